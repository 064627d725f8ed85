"""Engines in a placement group that a trainer has made on a Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import Nodes, ray_cluster
from ray_given import CORE, Trainer, a_trainer, nodes_of, written
from up_helpers import WAIT_S, known, own_state, rlctl_command, until

from rlctl.sdk.blocking import connect

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Nodes of 4 cores each, as far as Ray is told."""
    with ray_cluster(tmp_path_factory.mktemp("ray"), 4, 4) as nodes:
        yield nodes


@pytest.fixture
def trainer(cluster: Nodes) -> Iterator[Trainer]:
    with a_trainer(cluster) as trainer:
        yield trainer


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cluster: Nodes) -> Iterator[None]:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with own_state(monkeypatch, tmp_path):
        yield


def test_engines_are_in_the_bundles_that_a_trainer_gives_beside_what_it_runs_there(
    trainer: Trainer, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """As slime does it: bundles of one place each, of which trainer and engines have a part each."""
    made = trainer(make="together", bundles=[CORE] * 8)
    own = [bundle for bundle, node in enumerate(made["nodes"]) if node == "127.0.0.3"]
    other = [bundle for bundle, node in enumerate(made["nodes"]) if node == "127.0.0.2"]
    assert len(own) == len(other) == 4
    for bundle in range(8):
        trainer(take="together", bundle=bundle, CPU=0.4)
    given = {"placement_group": "together", "bundles": [*own, *other], "bundle_share": 0.2}
    pair = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 2}
    kept_free = {"worker_type": "placeholder", "num_gpus": 1}
    file = written(tmp_path, tiny[1], given, {**pair, "num_gpus": 2}, kept_free, engine="torch")
    up = rlctl_command("up", file, "--detach", "-o", "json")
    assert up.returncode == 0, up.stderr
    first = json.loads(up.stdout)
    assert nodes_of(first["endpoint"]) == {"actor-0": "127.0.0.3"}
    # What the placeholder keeps free is the trainer's, all of it, and stays where it is when a group grows.
    trainer(take="together", bundle=own[2], CPU=0.6)
    file = written(tmp_path, tiny[1], given, pair, kept_free, engine="torch")
    plan = json.loads(rlctl_command("plan", file, "-o", "json").stdout)
    assert plan["reserved"] == {"actor-placeholder": [[0, 2]]}
    grown = rlctl_command("up", file, "-o", "json")
    assert grown.returncode == 0, grown.stderr
    assert nodes_of(first["endpoint"]) == {"actor-0": "127.0.0.3", "actor-1": "127.0.0.2"}
    with connect(first["endpoint"]) as fleet:
        assert fleet.generate("1+2=", model="actor", max_new_tokens=4).samples
    refused = rlctl_command("up", file, "--placement-group", "another")
    assert refused.returncode == 2
    assert "fleet.ray.placement_group: it cannot change in a fleet that is up" in refused.stderr
    assert rlctl_command("down", "--name", "given").returncode == 0
    assert trainer(state="together")["state"] == "CREATED", "it is not rlctl's to remove"
    trainer(remove="together")


def test_a_group_that_is_removed_ends_its_engines_and_one_of_its_name_has_them_again(
    trainer: Trainer, checkpoint: Any, tmp_path: Path
) -> None:
    trainer(make="lost", bundles=[CORE] * 2)
    file = written(tmp_path, checkpoint("one"), {"placement_group": "lost"}, {"worker_type": "regular", "num_gpus": 2})
    up = rlctl_command("up", file, "--detach", "-o", "json")
    assert up.returncode == 0, up.stderr
    running = [psutil.Process(known("given").processes[slot]) for slot in ("actor-0", "actor-1")]
    trainer(remove="lost")
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []
    log = Path(known("given").directory) / "logs" / "supervisor.log"
    until(lambda: "was ended with its placement group" in log.read_text(), "the cause is not told")
    until(lambda: "placement group 'lost' was removed" in log.read_text(), "what it waits for is not told")
    trainer(make="lost", bundles=[CORE] * 2)
    until(lambda: set(known("given").engines.values()) == {"ready"}, "they did not come up again")
    # A supervisor that is killed takes its engines along, and leaves the group.
    running = [psutil.Process(pid) for pid in known("given").processes.values()]
    os.kill(known("given").pid, 9)
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []
    assert trainer(state="lost")["state"] == "CREATED"
    trainer(remove="lost")


def test_what_a_group_has_no_place_for_is_refused_before_anything_starts(
    cluster: Nodes, trainer: Trainer, checkpoint: Any, tmp_path: Path
) -> None:
    trainer(make="small", bundles=[CORE] * 3)
    trainer(take="small", bundle=1, CPU=1)
    engines = {"worker_type": "regular", "num_gpus": 2}
    pair = {**engines, "num_gpus_per_engine": 2}

    def refused(ray: dict[str, object], *groups: dict[str, object]) -> str:
        ran = rlctl_command("up", written(tmp_path, checkpoint("one"), ray, *groups), "-o", "json")
        assert ran.returncode != 0
        assert ran.stdout == ""
        error = json.loads(ran.stderr.splitlines()[-1])["error"]
        return f"{error['reason']}: {error['message']} [{error['field']}]"

    few = refused({"placement_group": "small"}, {**engines, "num_gpus": 4})
    assert few == (
        "FIELD_INVALID: 3 bundles of placement group 'small' may be used, and the plan has places for 4 "
        "[fleet.ray.placement_group]"
    )
    few = refused({"placement_group": "small", "bundles": [0]}, engines)
    assert "fleet.ray.bundles: 1 bundles may be used, and the plan has places for 2" in few
    unknown = refused({"placement_group": "small", "bundles": [0, 7]}, engines)
    assert unknown.startswith("FIELD_INVALID: placement group 'small' has no bundle 7; it has 0 to 2")
    twice = refused({"placement_group": "small", "bundles": [0, 0]}, engines)
    assert "bundle 0 is there twice [fleet.ray.bundles]" in twice
    size = refused({"placement_group": "small"}, {**engines, "cpus_per_rank": 2})
    assert size.startswith("FIELD_INVALID: bundle 0 of placement group 'small' has 1 CPU, and a rank of actor-0 needs")
    assert refused({"placement_group": "smal"}, engines).startswith(
        "FIELD_INVALID: there is no placement group 'smal'; there are: small [fleet.ray.placement_group]"
    )
    trainer(make="wide", bundles=[{"CPU": 4}, CORE])  # no node has room for both
    wide = refused({"placement_group": "wide"}, pair)
    assert "the bundles of actor-0 are on several nodes: " in wide, wide
    trainer(remove="wide")
    with a_trainer(cluster) as other:
        there = other(make="small", bundles=[CORE])
        ambiguous = refused({"placement_group": "small"}, engines)
        assert ambiguous.startswith("FIELD_INVALID: 2 placement groups are called 'small': ")
        assert there["id"] in ambiguous
        other(remove="small")
    gone = refused({"placement_group": there["id"]}, {**engines, "num_gpus": 1})
    assert gone.startswith(f"PLACE_UNAVAILABLE: placement group '{there['id']}' was removed")


def test_a_bundle_that_somebody_has_is_told_with_what_is_left_of_it(
    trainer: Trainer, checkpoint: Any, tmp_path: Path
) -> None:
    made = trainer(make="taken", bundles=[CORE])
    trainer(take="taken", bundle=0, CPU=0.5)
    one = {"worker_type": "regular", "num_gpus": 1}
    ran = rlctl_command("up", written(tmp_path, checkpoint("one"), {"placement_group": made["id"]}, one))
    assert ran.returncode != 0
    assert "bundle 0 of placement group" in ran.stderr
    assert "has 0.5 of 1 CPU free, and a rank takes 1" in ran.stderr
    file = written(tmp_path, checkpoint("one"), {"placement_group": made["id"], "bundle_share": 0.5}, one)
    up = rlctl_command("up", file, "--detach")
    assert up.returncode == 0, up.stderr


def generated(url: str) -> int:
    """Tokens of an answer to four that are asked for."""
    body = json.dumps({"text": "1+2=", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return int(json.load(answer)["meta_info"]["completion_tokens"])


def test_a_trainer_of_slimes_starts_its_engines_in_its_own_placement_group(
    trainer: Trainer, tiny: tuple[Any, Path]
) -> None:
    trainer(make="rollout", bundles=[CORE] * 4)
    for bundle in range(4):
        trainer(take="rollout", bundle=bundle, CPU=0.4)
    args = {
        "hf_checkpoint": str(tiny[1]),
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "sglang_config": None,
    }
    flags = ["--engine", "torch", "--insecure"]
    few = trainer(slime=args, group="rollout", bundles=[3], flags=flags)
    assert "1 bundles may be used, and the plan has places for 2" in few["refused"]
    started = trainer(slime=args, group="rollout", bundles=[3, 1], flags=flags)
    (host, port) = started["routers"]["actor"]
    assert generated(f"http://{host}:{port}") == 4
    running = [psutil.Process(pid) for pid in known("slime").processes.values()]
    trainer(stop="slime")
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []
    assert trainer(state="rollout")["state"] == "CREATED"
    trainer(remove="rollout")


def test_skyrls_server_group_over_a_fleet(cluster: Nodes, tiny: tuple[Any, Path]) -> None:
    with a_trainer(cluster) as trainer:
        made = trainer(make="servers", bundles=[CORE] * 6)
        wanted = {
            "skyrl": {"model": str(tiny[1]), "tensor_parallel_size": 1},
            "group": "servers",
            "flags": ["--insecure"],
        }
        few = trainer(**wanted, servers=9, offset=2)
        assert "9 servers of 1 ranks need 9 bundles, and from 2 on the placement group has 4" in few["refused"]
        started = trainer(**wanted, servers=2, offset=4)
        infos = {info["slot"]: info for info in started["infos"]}
        assert {slot: info["bundles"] for slot, info in infos.items()} == {"actor-0": [4], "actor-1": [5]}
        assert {slot: info["ip"] for slot, info in infos.items()} == {
            "actor-0": made["nodes"][4], "actor-1": made["nodes"][5],
        }  # fmt: skip
        assert len({info["port"] for info in infos.values()}) == 2
        assert generated(started["url"]) == 4
        running = [psutil.Process(pid) for pid in known("skyrl").processes.values()]
    # The trainer has ended, and with it what it had started.
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []
