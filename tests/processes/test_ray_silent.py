"""Calls to a silent head of a Ray cluster end, and their errors name the call."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray_cluster import Nodes, ray_cluster
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.ray import bounded_calls, placement_groups
from rlctl.launch.ray.launcher import RayLauncher

pytestmark = pytest.mark.processes

CALL_S = 1.0
ANSWERS_S = 20.0
"""Seconds after which the head answers again, so that a test that fails ends."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Nodes]:
    with ray_cluster(tmp_path, 4) as nodes:
        yield nodes


@contextmanager
def silent(cluster: Nodes) -> Iterator[None]:
    """Stop the head of a cluster."""
    children = psutil.Process(cluster._process.pid).children(recursive=True)
    (head,) = (child for child in children if child.name() == "gcs_server")
    answering = threading.Timer(ANSWERS_S, head.resume)
    os.kill(head.pid, signal.SIGSTOP)
    answering.start()
    try:
        yield
    finally:
        answering.cancel()
        head.resume()


def groups(state: str) -> set[str]:
    """The names of the placement groups in a state."""
    return {about["name"] for about in placement_group_table().values() if about["state"] == state}


@pytest.mark.timeout(300)
async def test_calls_to_a_head_that_does_not_answer_end(
    cluster: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = RayLauncher(tmp_path, listen="127.0.0.2:1", address=cluster.address)
    try:
        reserved = Reservation("ref", 1, "cpu")
        launcher.make_room((), [reserved])
        monkeypatch.setattr(bounded_calls, "CALL_S", CALL_S)
        monkeypatch.setattr(placement_groups, "REMOVE_S", CALL_S)
        began = time.monotonic()
        with silent(cluster):
            with pytest.raises(RlctlError, match="Ray's head has not answered for 1 s: the free resources") as caught:
                launcher.make_room((), [reserved, Reservation("judge", 1, "cpu")])
            assert caught.value.reason is Reason.UNREACHABLE
            process = launcher.launch(EngineSpec("actor-0", "/nowhere", engine="fake"), 0, "127.0.0.2:1")
            assert process.returncode is not None
            assert process.failure().reason is Reason.UNREACHABLE
            with pytest.raises(RlctlError, match="the placement group of judge"):
                placement_groups._made("judge", [{"CPU": 1.0}], strategy="PACK")
            launcher.make_room((), ())  # a removal waits for nothing
            assert time.monotonic() - began < ANSWERS_S
        await eventually(lambda: groups("REMOVED") >= {"rlctl ref", "rlctl judge"}, 60)
        assert not groups("CREATED")
    finally:
        monkeypatch.undo()
        launcher.close()
        assert not ray.is_initialized()
