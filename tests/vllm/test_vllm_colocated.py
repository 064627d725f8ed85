"""A co-located trainer in front of a real vLLM server: its handles are read by rlctl's code in vLLM's workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk import aio
from rlctl.weights.tensor.digest import combine, tensor_digest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TRAINER = Path(__file__).parents[1] / "support" / "colocated_trainer.py"


@pytest.fixture(scope="module")
def fleet(vllm: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    """One vLLM server of one rank, at the checkpoint."""
    engines = [EngineSpec("actor-0", str(tiny[1]), engine="vllm")]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.parametrize("trainer", ["slime", "miles"])
async def test_the_ranks_have_the_trainers_weights(
    fleet: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    gateway = GatewayServer(GatewayConfig(fleet.address, dialect="sglang"))
    try:
        await gateway.start()
        url = f"http://{gateway.address}/engines/actor-0"
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(TRAINER), str(tiny[1]), str(tmp_path), trainer, "1,2", f"{url}=1",
            env={**os.environ, "STAND_IN": "1"}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert [json.loads(line)["left"] for line in told.decode().splitlines()] == [[], []]
        async with await aio.connect(fleet.address) as client:
            [model] = await client.models()
    finally:
        await gateway.stop()
    tensors = load_file(tmp_path / "2.safetensors")
    expected = combine({name: tensor_digest(name, tensor) for name, tensor in tensors.items()})
    assert model.model_digest == expected
