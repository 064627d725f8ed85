"""A real vLLM on a GPU, launched and attached to: updates by every path. `tools/gpu` runs it. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from path_suite import *  # noqa: F403
from path_suite import NO_GPU, Served, in_bfloat16
from plain_server import OnPort, serving

import rlctl
from rlctl.engine import EngineConfig
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), NO_GPU]

ARGUMENTS = {
    "gpu_memory_utilization": "0.2",
    "max_num_seqs": "8",
    "max_model_len": "512",
}
"""Captured graphs keep the addresses of weights. The memory leaves room for a shadow copy and for other tests."""


@pytest.fixture(scope="module", params=["launched", "attached"])
def served(
    request: pytest.FixtureRequest,
    vllm: str,
    spawning: dict[str, str],
    tiny: tuple[Any, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A server with a rank on each GPU but the last one, at most two, or with one rank."""
    ranks = 2 if torch.cuda.device_count() > 2 else 1
    model, checkpoint = in_bfloat16(tiny[0], tmp_path_factory.mktemp("bfloat16") / "checkpoint")
    roots = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in spawning.items():
            patch.setenv(name, value)
        if request.param == "launched":
            spec = EngineSpec(
                "actor-0", str(checkpoint), engine="vllm", tp_size=ranks, device="cuda", options=ARGUMENTS | roots
            )
            with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
                yield Served(fleet, model, ranks, "cuda")
            return
        config = EngineConfig(str(checkpoint), tp_size=ranks, device="cuda", dtype="bfloat16")
        with serving(OnPort(config, ARGUMENTS)) as url, rlctl.embedded([url], options=roots) as fleet:
            yield Served(fleet, model, ranks, "cuda")
