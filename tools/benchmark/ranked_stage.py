"""A stage of several ranks in one process: ``python -m tools.benchmark.ranked_stage``.

Rank 0 reaches the followers as between machines, each over its own gRPC link. The engine is the fake engine.
"""

from __future__ import annotations

from rlctl.engine import EngineConfig
from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, collect_seldom, end_with_parent, stop_event
from rlctl.stage.server import StageConfig, StageServer
from rlctl.worker.server import WorkerConfig, WorkerServer
from tools.benchmark.child import arguments


async def _serve(coordinator: str, slot: str, checkpoint: str, ranks: int) -> None:
    stop = stop_event()
    config = EngineConfig(checkpoint, tp_size=ranks)
    workers = [
        WorkerServer(WorkerConfig("fake", EngineConfig(checkpoint, rank=rank, tp_size=ranks)))
        for rank in range(1, ranks)
    ]
    followers = [await worker.start() for worker in workers]
    stage = StageServer(StageConfig(slot, "actor", "fake", config, followers, coordinator=coordinator))
    await stage.start()
    announce("ranked", slot=slot)
    await stop.wait()
    await stage.stop()
    for worker in workers:
        await worker.stop()


if __name__ == "__main__":
    options = arguments(coordinator=str, slot=str, checkpoint=str, ranks=int)
    end_with_parent()
    collect_seldom()  # as the real servers do
    event_loops.run(_serve(options.coordinator, options.slot, options.checkpoint, options.ranks))
