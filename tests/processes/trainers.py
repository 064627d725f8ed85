"""Trainers in processes of their own: of several ranks, run to their end, or killed half-way through a broadcast."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forking import NURSERY

from rlctl.sdk.blocking import Fleet

RANK = Path(__file__).with_name("trainer_rank.py")
DYING = Path(__file__).with_name("dying_trainer.py")
PP_TP = {"layout": "pp-tp", "size": 4, "sources": [0, 2]}
FSDP = {"layout": "fsdp", "size": 2, "sources": [0]}

MOST_S = 150.0
"""That a trainer may take, all its updates."""


def train(
    fleet: Fleet, directory: Path, *, seeds: list[int], model: str = "dense", deadline_s: float = 60.0, **settings: Any
) -> list[Any]:
    """Run a trainer to its end: what each rank said of each update, by rank; a rank that was killed says less."""
    common = settings | {
        "model": model,
        "seeds": seeds,
        "deadline_s": deadline_s,
        "address": fleet.aio.connection.address,
        "store": str(directory / "store"),
    }
    logs = [(directory / f"trainer-{rank}.err").open("w+b") for rank in range(settings["size"])]
    ranks = [
        NURSERY.script([str(RANK), json.dumps(common | {"rank": rank})], stderr) for rank, stderr in enumerate(logs)
    ]
    said = []
    try:
        for rank, (process, stderr) in enumerate(zip(ranks, logs, strict=True)):
            code = process.wait(MOST_S)
            said.append([json.loads(line) for line in process.stdout])
            stderr.seek(0)
            assert code == (-9 if rank == settings.get("dies") else 0), stderr.read().decode()
    finally:
        for process, stderr in zip(ranks, logs, strict=True):
            process.kill()
            process.close()
            stderr.close()
    return said


@contextlib.contextmanager
def half_way(address: str, directory: Path, *, token: str = "", **options: Any) -> Iterator[None]:
    """Run a trainer that stays half-way through a broadcast, and kill it at the end of the context."""
    with (directory / "trainer.err").open("w+b") as stderr:
        trainer = NURSERY.script([str(DYING), address, json.dumps({"token": token} | options)], stderr)
        try:
            assert trainer.stdout.readline() == b"half-way\n", (stderr.seek(0), stderr.read())
            yield
        finally:
            trainer.kill()
            trainer.wait(20)
            trainer.close()
