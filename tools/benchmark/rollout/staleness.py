"""Requests during updates, joins and restarts: the number of tokens that are too old."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from rlctl.contract.errors import Reason
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import grpc
from rlctl.transport.status import from_grpc
from rlctl.v1.common_pb2 import PAUSE_MODE_RETRACT
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.verbs_pb2 import UpdateOptions, UpdateWeightsFromDiskRequest
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rollout import clients
from tools.benchmark.rollout.ways import PROMPT

ASKERS = 32
TOKENS = 8
EVERY = 5
"""Updates between a restart or a join and the next restart or join."""

_Ask = Callable[[], Awaitable[list[int]]]


def measure(setting: Setting) -> Reading:
    """Count stale tokens, requests and failed requests."""
    requests, updates = (400, 4) if setting.quick else (10_000, 50)
    stale, asked, tokens, failed = clients.run(setting, _measure(setting.directory, requests, updates))
    details = {"requests": asked, "tokens": tokens, "failed_requests": failed, "updates": updates}
    return Reading(stale, stale, stale, details=details)


async def _measure(directory: Path, requests: int, updates: int) -> tuple[int, int, int, int]:
    def checkpoint(name: str) -> str:
        path = directory / f"weights-{name}"
        path.mkdir()
        (path / "weights.txt").write_text(name)
        return str(path)

    first = checkpoint("first")
    specs = [StageSpec(slot, first) for slot in ("a", "b", "c")]
    counted = {"stale": 0, "asked": 0, "tokens": 0, "failed": 0}
    over = asyncio.Event()
    async with InProcessFleet(directory / "stale.db", specs) as fleet:
        gateway = GatewayServer(GatewayConfig(fleet.server.address))
        await gateway.start()
        client = await aio.connect(fleet.server.address)
        rollout = client.rollout("actor")
        http = aiohttp.ClientSession(f"http://{gateway.address}")

        async def by_sdk() -> list[int]:
            (sample,) = await rollout.generate(PROMPT, max_new_tokens=TOKENS)
            return [version.sequence for version in sample.versions if version is not None]

        async def by_http() -> list[int]:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": TOKENS}}
            async with http.post("/generate", json=body) as response:
                response.raise_for_status()
                spans = (await response.json())["meta_info"]["weight_versions"]
            return [span["seq"] for span in spans for _ in range(span["start"], span["end"])]

        async def run(ask: _Ask) -> None:
            while not over.is_set() or counted["asked"] < requests:
                published = fleet.server.coordinator.roster.fleet().models[0].latest.sequence
                counted["asked"] += 1
                try:
                    sequences = await ask()
                except Exception:  # noqa: BLE001 - counted, and told
                    counted["failed"] += 1
                    continue
                counted["tokens"] += len(sequences)
                counted["stale"] += sum(sequence < published for sequence in sequences)

        asking = [asyncio.create_task(run(ask)) for ask in (by_sdk, by_http) for _ in range(ASKERS // 2)]
        options = UpdateOptions(pause=PAUSE_MODE_RETRACT)
        for number in range(updates):
            while counted["asked"] < requests * number / updates:  # noqa: ASYNC110 - a number has no event
                await asyncio.sleep(0.01)
            if number % EVERY == 1:
                stage = fleet.stages.pop("a")
                await stage.stop()
                await fleet.start_stage(specs[0])
            elif number % EVERY == 3:
                await fleet.start_stage(StageSpec(f"late-{number}", first))
            path = checkpoint(str(number))
            update = UpdateWeightsFromDiskRequest(model_path=path, weight_version=str(number), options=options)
            operation = await _begun(fleet, update)
            if operation.state != OPERATION_STATE_OK:
                raise RuntimeError(f"update {number}: {operation.error.message}")
        over.set()
        await asyncio.gather(*asking)
        await http.close()
        await client.close()
        await gateway.stop()
    return counted["stale"], counted["asked"], counted["tokens"], counted["failed"]


async def _begun(fleet: InProcessFleet, update: UpdateWeightsFromDiskRequest) -> Operation:
    """Begin an update, and retry while a heal of a new stage conflicts."""
    while True:
        try:
            operation: Operation = await fleet.stub.UpdateWeightsFromDisk(update)
        except grpc.aio.AioRpcError as error:
            if from_grpc(error).reason is not Reason.OPERATION_CONFLICT:
                raise
            await asyncio.sleep(0.05)
        else:
            return operation
