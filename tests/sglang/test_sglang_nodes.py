"""One real SGLang server on two nodes: network namespaces with a shared memory each, a process of rlctl's on each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from elsewhere import OWN_SHARED_MEMORY, need, serving

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NODES = {"first": "10.96.1.1", "second": "10.96.1.2"}

TRAINER = """
import contextlib, json, sys
import rlctl
from models import changed, greedy
from rlctl.trainer.probe import Probe
from rlctl.demo import tiny
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common

coordinator, host = sys.argv[1:]

def say(**what):
    print(json.dumps(what), flush=True)

with rlctl.connect(coordinator) as fleet:
    (stage,) = fleet.status().stages
    capabilities = stage.registration.capabilities
    say(
        workers=[(worker.rank, worker.tp, worker.node) for worker in stage.registration.layout.workers],
        transports=[common.Transport.Name(each) for each in capabilities.transports],
        levels=[common.VerificationLevel.Name(each) for each in capabilities.verification],
    )
    model = changed(tiny.make(seed=3), seed=8)
    probe = Probe.of(model, [encode("1+2=3")], tolerance=1e-3)
    with contextlib.closing(fleet.publisher("actor", host=host)) as publisher:
        result = publisher.update(model, version="sent", probe=probe)
    (updated,) = result.operation.stage_results
    (sample,) = fleet.generate(encode("3+"), max_new_tokens=12, temperature=0.0, ignore_eos=True).samples
    say(
        verified=common.VerificationLevel.Name(updated.verified),
        label=[span.version.label for span in sample.versions],
        right=list(sample.output_ids) == greedy(model, encode("3+"), 12),
    )
    running = fleet.generate_stream(encode("4"), max_new_tokens=900, ignore_eos=True)
    next(running)
    say(running=True)
    try:
        for part in running:
            pass
        say(ended=str(part.samples[0].finish_reason))
    except rlctl.RlctlError as error:
        say(ended=error.reason.name)
    for event in fleet.watch():
        (stage,) = event.fleet.stages
        if not stage.routable and not any(rank.alive for rank in stage.report.ranks):
            say(lost=[rank.reason for rank in stage.report.ranks])
            break
"""
"""Updates the server and generates; then says what becomes of a request, and of the stage, whose node ends."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


LEVELS = ("NONE", "RECEIVED", "REPLICA", "EXPECTED", "PROBE")
"""Levels of a server whose ranks all answer, on every node."""


@pytest.fixture
def nodes() -> Iterator[dict[str, tuple[str, ...]]]:
    """How a command is run on each: a network of their own between them, and no memory that both see."""
    need(*OWN_SHARED_MEMORY, "true")
    names = {node: f"rlctl-{uuid4().hex[:6]}-{node[0]}" for node in NODES}
    with ExitStack() as stack:
        for name in names.values():
            need("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        first, second = names.values()
        run("ip", "-n", first, "link", "add", "data", "type", "veth", "peer", "name", "data", "netns", second)
        for node, address in NODES.items():
            run("ip", "-n", names[node], "address", "add", f"{address}/24", "dev", "data")
            run("ip", "-n", names[node], "link", "set", "data", "up")
        resolving = ("env", "RES_OPTIONS=timeout:1 attempts:1")
        yield {node: ("ip", "netns", "exec", name, *OWN_SHARED_MEMORY, *resolving) for node, name in names.items()}


@contextmanager
def trainer(place: tuple[str, ...], coordinator: str, host: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What the trainer says, line by line."""
    support = os.pathsep.join(path for path in sys.path if path.endswith("support"))
    command = [*place, sys.executable, "-c", TRAINER, coordinator, host]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": support}
    ) as process:
        assert process.stdout is not None
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


def test_a_server_on_two_nodes_is_updated_and_ends_with_one_of_them(
    sglang: str, nodes: dict[str, tuple[str, ...]], tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    engine = ("--engine", "sglang", "--model-path", str(tiny[1]), "--tp-size", "2", "--insecure")
    journal = ("--journal", str(tmp_path / "journal.db"), "--insecure")
    at = {node: ("--node", address, "--listen", f"{address}:0") for node, address in NODES.items()}
    with ExitStack() as stack:

        def start(node: str, name: str, *arguments: str) -> dict[str, str]:
            return stack.enter_context(serving(nodes[node], *arguments, log=tmp_path / f"{name}.log"))

        address = start("first", "coordinator", "coordinator", "--listen", f"{NODES['first']}:0", *journal)["address"]
        worker = start("second", "second", "worker", *engine, "--rank", "1", *at["second"])
        stage = ("--slot", "actor-0", "--coordinator", address, "--rollout-listen", f"{NODES['first']}:0")
        start("first", "first", "stage", *engine, *at["first"], *stage, "--follower", worker["address"])
        said = stack.enter_context(trainer(nodes["first"], address, NODES["first"]))
        assert next(said) == {
            "workers": [[0, 0, NODES["first"]], [1, 1, NODES["second"]]],
            "transports": ["TRANSPORT_TORCH_GLOO", "TRANSPORT_DISK", "TRANSPORT_SHARED_MEMORY"],
            "levels": [f"VERIFICATION_LEVEL_{level}" for level in LEVELS],
        }
        assert next(said) == {"verified": "VERIFICATION_LEVEL_EXPECTED", "label": ["sent"], "right": True}
        assert next(said) == {"running": True}
        os.kill(int(worker["pid"]), signal.SIGKILL)
        assert next(said)["ended"] in ("ENGINE_FAILED", "UNREACHABLE", "STAGE_NOT_SERVING")
        lost = next(said)["lost"]
        assert len(lost) == 2
        assert all("node 1 of the server" in reason for reason in lost)
