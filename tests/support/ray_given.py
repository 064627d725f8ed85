"""A trainer with its own placement groups on a Ray cluster, and topology files for fleets in these groups."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray_cluster import Nodes
from up_helpers import WAIT_S

from rlctl.sdk.blocking import connect

CORE = {"CPU": 1}


class Trainer:
    """A separate driver on the cluster."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, **order: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


@contextmanager
def a_trainer(cluster: Nodes) -> Iterator[Trainer]:
    program = Path(__file__).parent / "ray_trainer.py"
    with subprocess.Popen(
        [sys.executable, str(program), cluster.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        yield Trainer(process)
        process.communicate(timeout=WAIT_S)


def written(
    tmp_path: Path, checkpoint: str | Path, ray: dict[str, object], *groups: dict[str, object], engine: str = "fake"
) -> str:
    """Write a topology file of a model with these groups."""
    fleet = {"name": "given", "launcher": "ray", "listen": "127.0.0.2:0", "ray": ray, "num_gpus_per_node": 4}
    model = {"name": "actor", "engine": engine, "model_path": str(checkpoint), "server_groups": list(groups)}
    file = tmp_path / "given.yaml"
    file.write_text(json.dumps({"fleet": {**fleet, "restart": {"backoff_s": 0.1}}, "models": [model]}))
    return str(file)


def nodes_of(endpoint: str) -> dict[str, str]:
    with connect(endpoint) as fleet:
        return {
            stage.registration.slot: stage.registration.address.rpartition(":")[0]
            for stage in fleet.status().stages
        }  # fmt: skip
