"""A co-located trainer in front of a fleet of one server, with checks of its result."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from trainer_scripts import ended

from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.sdk import aio
from rlctl.weights.tensor.digest import combine, tensor_digest

TRAINER = Path(__file__).parent / "colocated_trainer.py"


async def assert_updates(coordinator: str, checkpoint: Path, output: Path, trainer: str) -> None:
    """Check that two updates by handle reach every rank of the only engine, and that no reference stays."""
    gateway = GatewayServer(GatewayConfig(coordinator, dialect="sglang"))
    try:
        await gateway.start()
        async with await aio.connect(coordinator) as client:
            (stage,) = await client.stages()
        ranks = len(stage.registration.layout.workers)
        place = f"http://{gateway.address}/engines/{stage.registration.slot}={ranks}"
        trained = await ended(TRAINER, str(checkpoint), str(output), trainer, "1,2", place, STAND_IN="1")
        assert trained.returncode == 0, trained.stderr
        assert [json.loads(line)["left"] for line in trained.stdout.splitlines()] == [[], []]
        async with await aio.connect(coordinator) as client:
            [model] = await client.models()
    finally:
        await gateway.stop()
    tensors = load_file(output / "2.safetensors")
    expected = combine({name: tensor_digest(name, tensor) for name, tensor in tensors.items()})
    assert model.model_digest == expected
