"""A stage of several ranks in one process: ``python -m tools.benchmark.ranked_stage``.

Rank 0 reaches the followers as between machines, each over its own gRPC link. The engine is the fake engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rlctl.engine import EngineConfig
from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, collect_seldom, end_with_parent, stop_event
from rlctl.stage.server import StageConfig, StageServer
from rlctl.worker.server import WorkerConfig, WorkerServer


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--end-with-parent", action="store_true")
    given = parser.parse_args(arguments)
    if given.end_with_parent:
        end_with_parent()
    collect_seldom()  # as the real servers do
    event_loops.run(_serve(given.coordinator, given.slot, given.checkpoint, given.ranks))


if __name__ == "__main__":
    main()
