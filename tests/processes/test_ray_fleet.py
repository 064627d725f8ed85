"""The same file on a Ray cluster of three nodes: spread, scaled under load, moved when a node or an actor is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import Nodes, ray_cluster
from up_helpers import EXAMPLE, WAIT_S, Load, known, own_state, rlctl_command, when

from rlctl.sdk.blocking import Fleet, connect
from rlctl.v1.fleet_pb2 import Stage

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Nodes of 1 core, 8 and 8, as far as Ray is told."""
    with ray_cluster(tmp_path_factory.mktemp("ray"), 1, 8, 8) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with own_state(monkeypatch, tmp_path):
        yield


@pytest.fixture
def up(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What follows ``rlctl up FILE``."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return ["--launcher", "ray", "-o", "json", "--yes"]


def stages(fleet: Fleet) -> dict[str, Stage]:
    return {stage.registration.slot: stage for stage in fleet.status().stages}


def again(now: dict[str, Stage], before: dict[str, Stage], slots: list[str]) -> bool:
    """Whether other processes than before fill the slots, and are routable."""
    return now.keys() == before.keys() and all(
        now[slot].routable and now[slot].registration.boot_id != before[slot].registration.boot_id for slot in slots
    )


def node(stage: Stage) -> str:
    return stage.registration.address.rpartition(":")[0]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_same_file_on_a_cluster(cluster: Nodes, up: list[str], tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = tiny
    text = EXAMPLE.read_text().replace("/tmp/tiny", str(checkpoint))
    text = text.replace("fleet:\n", "fleet:\n  restart: {backoff_s: 0.1}\n", 1)
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    started = rlctl_command("up", str(file), *up, "--detach", "--listen", "127.0.0.2:0")
    assert started.returncode == 0, started.stderr
    first = json.loads(started.stdout)
    assert first["engines"] == {"actor-0": "ready", "ref-0": "ready", "reward-0": "ready"}

    file.write_text(text.replace("num_gpus: 2\n", "num_gpus: 4\n", 1).replace("num_gpus: 5", "num_gpus: 7"))
    with connect(first["endpoint"]) as fleet:
        # Its ranks are beside each other; the node with one core has no room for them.
        (actor,) = (stage for slot, stage in stages(fleet).items() if slot == "actor-0")
        assert {rank.node for rank in actor.registration.layout.workers} == {node(actor)} <= {"127.0.0.3", "127.0.0.4"}
        with Load(fleet, "actor") as load:
            publisher = fleet.publisher("actor")
            for parameter in model.parameters():
                parameter.data.mul_(0.999)
            load.least = publisher.update(model, version="step-1", pause="retract").version.sequence
            done = load.done
            grown = rlctl_command("up", str(file), *up)
            assert grown.returncode == 0, grown.stderr
            assert load.done > done, "nothing was served meanwhile"
            load.least = publisher.update(model, version="step-2", pause="retract").version.sequence
        assert load.wrong == []
        before = now = stages(fleet)
        actors = {slot: node(stage) for slot, stage in now.items() if slot.startswith("actor")}
        assert actors.keys() == {"actor-0", "actor-1"}
        assert set(actors.values()) == {"127.0.0.3", "127.0.0.4"}, "engines of a model are on different nodes"

        # An actor of Ray's that dies takes its engine along, which is started again.
        engine = psutil.Process(known("multi-model").processes["actor-0"])
        keeper = engine.parent()
        assert keeper is not None
        assert "ray::" in " ".join(keeper.cmdline())
        keeper.kill()
        engine.wait(WAIT_S)
        now = when(fleet, lambda now: again(now, before, ["actor-0"]))
        assert now["actor-0"].report.weight_version.label == "step-2"

        # A node that is lost takes its engines along; they come up on the others, at the published version.
        lost = node(now["actor-1"])
        on_it = [slot for slot, stage in now.items() if node(stage) == lost]
        before = now
        cluster(f"lose {lost}")
        now = when(fleet, lambda now: again(now, before, on_it))
        for slot, stage in now.items():
            assert stage.report.weight_version.label == ("step-2" if slot.startswith("actor") else "initial")
            assert node(stage) != lost
            assert slot in on_it or stage.registration.boot_id == before[slot].registration.boot_id, "it was moved"
        assert fleet.generate("1+2=", model="actor", max_new_tokens=4).samples
        publisher.close()
        cluster(f"add {lost} 8")
    running = [psutil.Process(pid) for pid in known("multi-model").processes.values()]
    assert rlctl_command("down", "--name", "multi-model").returncode == 0
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []


def fleet_of(tmp_path: Path, checkpoint: Path, head: str, groups: str) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        f"fleet: {{name: small, launcher: ray, listen: '127.0.0.2:0', hf_checkpoint: {checkpoint}, {head}}}\n"
        f"models:\n  - name: actor\n    server_groups:\n{groups}"
    )
    return file


def test_an_engine_larger_than_a_node_has_ranks_on_several_and_nothing_outlives_the_supervisor(
    up: list[str], tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    group = "      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}\n"
    file = fleet_of(tmp_path, tiny[1], "num_gpus_per_node: 1", group)
    started = rlctl_command("up", str(file), *up, "--detach")
    assert started.returncode == 0, started.stderr
    with connect(known("small").endpoint) as fleet:
        ranks = stages(fleet)["actor-0"].registration.layout.workers
        assert len({rank.node for rank in ranks}) == 2
        assert fleet.generate("1+2=", model="actor", max_new_tokens=4).samples
    running = [psutil.Process(pid) for pid in known("small").processes.values()]
    assert len(running) == 3
    os.kill(known("small").pid, signal.SIGKILL)
    assert psutil.wait_procs(running, timeout=WAIT_S)[1] == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("      - {worker_type: regular, num_gpus: 12, num_gpus_per_engine: 12}\n",
         "actor-0: no node has 12 CPU free (127.0.0.2 has "),
        ("      - {worker_type: regular, num_gpus: 1}\n      - {worker_type: placeholder, num_gpus: 99}\n",
         "actor-placeholder: 99 of these are to be kept free, and 127.0.0.2 has "),
    ],
)  # fmt: skip
def test_what_has_no_room_is_refused_with_what_there_is(
    up: list[str], tiny: tuple[Any, Path], tmp_path: Path, groups: str, words: str
) -> None:
    refused = rlctl_command("up", str(fleet_of(tmp_path, tiny[1], "num_gpus_per_node: 16", groups)), *up)
    assert refused.returncode != 0
    assert "PLACE_UNAVAILABLE" in refused.stderr
    assert words in refused.stderr
    assert refused.stdout == ""


def test_a_cluster_that_is_not_there_is_told(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    file = fleet_of(tmp_path, tiny[1], "ray: {address: '127.0.0.1:1'}", "      - {worker_type: regular, num_gpus: 1}\n")
    refused = rlctl_command("up", str(file))
    assert refused.returncode == 5
    assert "no Ray cluster answers at 127.0.0.1:1" in refused.stderr
