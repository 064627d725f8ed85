"""SGLang's interface in front of torch engines of two ranks and of one; and what slime and Miles send to it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from sglang_suite import *  # noqa: F403 - the tests themselves
from sglang_suite import Server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

INTEGRATIONS = Path(__file__).parents[2] / "examples" / "integrations"


@pytest.mark.parametrize("trainer", ["slime", "miles", "verl"])
async def test_the_upstream_updates_end_in_equal_digests(server: Server, trainer: str) -> None:
    engines = [f"--engine={url}={ranks}" for url, ranks in zip(server.engines, server.ranks, strict=True)]
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        str(INTEGRATIONS / trainer / "update.py"),
        f"--model={server.tiny[1]}",
        *engines,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await script.communicate()
    assert script.returncode == 0
    steps = [json.loads(line) for line in output.decode().splitlines()]
    assert [step["weight_version"] for step in steps] == [["1"], ["2"]]
    assert steps[0]["model_digest"] != steps[1]["model_digest"]
