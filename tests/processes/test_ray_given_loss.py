"""Engines in a placement group that a trainer has made, when a node of the Ray cluster is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import ray_cluster
from ray_given import CORE, a_trainer, nodes_of, written
from up_helpers import known, own_state, rlctl_command, until, when

from rlctl.sdk.blocking import connect

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(240)]


def test_an_engine_whose_node_is_lost_follows_its_bundle_to_another(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a bundle that no one else has, whichever node comes first now."""
    with (
        ray_cluster(tmp_path, 0, 1, 1) as cluster,
        own_state(monkeypatch, tmp_path),
        a_trainer(cluster) as trainer,
    ):
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        trainer(make="spread", bundles=[CORE] * 2)
        two = {"worker_type": "regular", "num_gpus": 2}
        file = written(tmp_path, checkpoint("one"), {"placement_group": "spread"}, two)
        up = rlctl_command("up", file, "--detach", "-o", "json")
        assert up.returncode == 0, up.stderr
        endpoint = json.loads(up.stdout)["endpoint"]
        assert nodes_of(endpoint) == {"actor-0": "127.0.0.3", "actor-1": "127.0.0.4"}
        stays = psutil.Process(known("given").processes["actor-1"])
        cluster("lose 127.0.0.3")
        log = Path(known("given").directory) / "logs" / "supervisor.log"
        until(lambda: "'spread' is RESCHEDULING: its cluster has no room for it" in log.read_text(), "it is not told")
        with connect(endpoint) as fleet:
            fleet.update_weights_from_disk(checkpoint("two"), version="two")
        cluster("add 127.0.0.5 1")
        with connect(endpoint) as fleet:
            there = when(fleet, lambda stages: len(stages) == 2 and all(s.routable for s in stages.values()))
        assert {stage.report.weight_version.label for stage in there.values()} == {"two"}
        assert nodes_of(endpoint) == {"actor-0": "127.0.0.5", "actor-1": "127.0.0.4"}
        assert stays.is_running()
        assert rlctl_command("down", "--name", "given").returncode == 0
        trainer(remove="spread")
