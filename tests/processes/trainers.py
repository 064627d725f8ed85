"""Trainers of several processes, run to their end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlctl.client.fleet import Fleet

RANK = Path(__file__).with_name("trainer_rank.py")
PP_TP = {"layout": "pp-tp", "size": 4, "sources": [0, 2]}
FSDP = {"layout": "fsdp", "size": 2, "sources": [0]}


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
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(common | {"rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(settings["size"])
    ]
    said = []
    for rank, process in enumerate(ranks):
        out, errors = process.communicate(timeout=150)
        assert process.returncode == (-9 if rank == settings.get("dies") else 0), errors
        said.append([json.loads(line) for line in out.splitlines()])
    return said
