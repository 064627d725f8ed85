"""Trainers and engines on several networks: a rank that could not join says so, before anything is paused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from elsewhere import need, serving

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

TRAINER = """
import json, sys
import rlctl
from rlctl.demo import tiny

coordinator, *hosts = sys.argv[1:]
with rlctl.connect(coordinator) as fleet:
    for seed, host in enumerate(hosts):
        publisher = fleet.publisher("actor", **{"network" if "/" in host else "host": host})
        said = {}
        try:
            said["digest"] = publisher.update(tiny.make(seed=seed), version=f"from {host}").model_digest
        except rlctl.OperationFailed as error:
            cause = error.operation.stage_results[0].rank_results[0].error
            said |= {"reason": cause.reason, "message": cause.message, "metadata": dict(cause.metadata)}
        stages = fleet.status().stages
        said["routable"] = [stage.routable for stage in stages]
        said["latest"] = fleet.status().models[0].latest.label
        said["verbs"] = [operation.verb for operation in fleet.operations()]
        print(json.dumps(said), flush=True)
        publisher.close()
"""
"""Updates from each of its hosts, and says what came of it."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two network namespaces that share a network, 10.97.1.0/24. The trainer's has another one, 10.97.2.0/24, which the
    engine's would reach over its default route, if that did not lead to a third one where nobody is.
    """

    trainer: tuple[str, ...]
    engine: tuple[str, ...]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    mark = uuid4().hex[:6]
    trainer, engine = f"rlctl-{mark}-t", f"rlctl-{mark}-e"
    with ExitStack() as stack:
        for name in (trainer, engine):
            need("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        need("ip", "-n", trainer, "link", "add", "control", "type", "veth", "peer", "name", "control", "netns", engine)
        run("ip", "-n", trainer, "link", "add", "data", "type", "veth", "peer", "name", "wrong", "netns", engine)
        for name, link, address in (
            (trainer, "control", "10.97.1.1/24"),
            (engine, "control", "10.97.1.2/24"),
            (trainer, "data", "10.97.2.1/24"),
            (engine, "wrong", "10.97.3.2/24"),
        ):
            run("ip", "-n", name, "address", "add", address, "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        run("ip", "-n", engine, "route", "add", "default", "via", "10.97.3.254")
        # There is no name server here: whoever asks for one must not wait for long.
        resolving = ("env", "RES_OPTIONS=timeout:1 attempts:1")
        yield Hosts(("ip", "netns", "exec", trainer, *resolving), ("ip", "netns", "exec", engine, *resolving))


def trained(place: tuple[str, ...], coordinator: str, *hosts: str) -> list[dict[str, Any]]:
    """What came of updates from each of these addresses, or networks, of the trainer."""
    command = [*place, sys.executable, "-c", TRAINER, coordinator, *hosts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_unreachable(said: dict[str, Any], source: str, interface: str, destination: str, *, by: str) -> None:
    """It names both ends, the interface, and the one that the route leads over; nothing was touched."""
    assert said["reason"] == "UNREACHABLE"
    metadata = said["metadata"]
    assert (metadata["source"], metadata["interface"], metadata["route"]) == (source, interface, by)
    assert metadata["destination"].rpartition(":")[0] == destination
    assert metadata["destination"] in said["message"]
    route = "" if by == interface else f", by a route over {by}"
    assert f"from {source} (interface {interface}){route}: " in said["message"]
    assert said["latest"] == "initial"
    assert said["routable"] == [True]
    assert set(said["verbs"]) <= {"InitWeightsUpdateGroup", "WeightUpdate"}, "nothing was paused or prepared"


def test_a_wrong_default_route_is_named_before_anything_is_paused(
    hosts: Hosts, tmp_path: Path, tiny: tuple[Any, Path]
) -> None:
    coordinator = ("coordinator", "--listen", "10.97.1.1:0", "--insecure", "--journal", str(tmp_path / "journal.db"))
    stage = ("stage", "--slot", "actor-0", "--model-path", str(tiny[1]), "--node", "10.97.1.2", "--insecure")
    bound = ("--listen", "10.97.1.2:0", "--rollout-listen", "10.97.1.2:0")
    with serving(hosts.trainer, *coordinator, log=tmp_path / "coordinator.log") as found:
        address = found["address"]
        with serving(hosts.engine, *stage, *bound, "--coordinator", address, log=tmp_path / "engine.log"):
            wrong, right, named = trained(hosts.trainer, address, "10.97.2.1", "10.97.1.1", "10.97.1.0/24")
    check_unreachable(wrong, "10.97.1.2", "control", "10.97.2.1", by="wrong")
    assert right["latest"] == "from 10.97.1.1", "the same engine takes the same update over the network that both have"
    assert named["latest"] == "from 10.97.1.0/24"
    assert right["routable"] == named["routable"] == [True]


def test_ipv6_loopback(tmp_path: Path, tiny: tuple[Any, Path]) -> None:
    need(sys.executable, "-c", "import socket; socket.create_server(('::1', 0), family=socket.AF_INET6).close()")
    coordinator = ("coordinator", "--listen", "[::1]:0", "--journal", str(tmp_path / "journal.db"))
    stage = ("stage", "--slot", "actor-0", "--model-path", str(tiny[1]), "--node", "::1")
    bound = ("--listen", "[::1]:0", "--rollout-listen", "[::1]:0")
    with serving((), *coordinator, log=tmp_path / "coordinator.log") as found:
        address = found["address"]
        with serving((), *stage, *bound, "--coordinator", address, log=tmp_path / "engine.log"):
            wrong, right, in_brackets = trained((), address, "127.0.0.1", "::1", "[::1]")
    check_unreachable(wrong, "::1", "lo", "127.0.0.1", by="lo")
    assert right["latest"] == "from ::1"
    assert in_brackets["latest"] == "from [::1]"
    assert right["routable"] == [True]
