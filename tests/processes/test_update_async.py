"""Updates that are under way while the trainer goes on: when its tensors are free, how such an update ends early."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds
from interrupted_weights import Interrupted

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer import lead, source_rank
from rlctl.trainer.lead import Leading
from rlctl.trainer.publisher import Publisher
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[Fleet]:
    """One engine shares memory with its trainer, the other one takes itself to be on another host."""
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    elsewhere = {"OTHER_HOST": "another-boot-id"}
    engines = [
        EngineSpec("near", str(tiny[1]), options=options),
        EngineSpec("far", str(tiny[1]), options=options, environment=elsewhere),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        directory = tmp_path_factory.mktemp("fleet")
        with LaunchedFleet(engines, directory=directory, module="other_host") as running, running.connect() as fleet:
            yield fleet


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes many more segments than there are."""
    monkeypatch.setattr(
        "rlctl.trainer.source_rank.SegmentSender", lambda device: SegmentSender(device, segment_bytes=32 << 10)
    )


class Counted:
    """Weights that count how often they are gone through."""

    def __init__(self, model: Any) -> None:
        self._source = as_source(model)
        self.passes = 0

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        yield from self._source.tensors()


class Held:
    """Weights that come to a halt before the last tensor, until they are let go."""

    def __init__(self, model: Any) -> None:
        self._source = as_source(model)
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self._source.tensors()):
            if index == len(self.metas()) - 1:
                self.reached.set()
                assert self.go_on.wait(60)
            yield pair


@pytest.fixture
def interrupts() -> Iterator[Callable[[], None]]:
    """Sends an interrupt to the main thread, and waits until it has arrived there."""
    arrived = threading.Event()

    def handle(number: int, frame: object) -> None:
        arrived.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert arrived.wait(10)

    before = signal.signal(signal.SIGINT, handle)
    yield interrupt
    signal.signal(signal.SIGINT, before)


def held_by(fleet: Fleet) -> set[str]:
    operation = fleet.check_weights()
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def scramble(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


@pytest.mark.parametrize("path", ["broadcast", "auto"])
@pytest.mark.parametrize("verify", ["expected", "none"])
def test_tensors_are_free_before_the_commit(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, path: str, verify: str
) -> None:
    publisher = fleet.publisher("actor", path=path)
    may_commit, commit = threading.Event(), Leading._commit

    async def gated(self: Leading, *given: Any) -> Any:
        await asyncio.to_thread(may_commit.wait, 60)
        return await commit(self, *given)

    monkeypatch.setattr(Leading, "_commit", gated)
    for seed in (11, 12):
        may_commit.clear()
        model = demo_tiny.make(seed=seed)
        sent = copy.deepcopy(model)
        weights = Counted(model)
        pending = publisher.update_async(weights, version=f"{path}-{verify}-{seed}", verify=verify, pause="in_place")
        pending.wait_sent()
        assert not pending.done()
        assert weights.passes == 1, "both paths are served in one pass"
        scramble(model)
        assert fleet.status().models[0].latest.label != f"{path}-{verify}-{seed}"
        may_commit.set()
        result = pending.wait()
        assert pending.done()
        pending.wait_sent()
        assert not pending.cancel(), "it has ended"
        assert fleet.status().models[0].latest == result.version
        assert holds(held_by(fleet), sent)
        assert held_by(fleet) == {result.model_digest} if verify == "expected" else not result.model_digest
        steps = {
            step.verb for step in fleet.operations(page_size=50) if step.update_id == result.operation.operation_id
        }
        assert "UpdateWeightsFromDistributed" in steps
        assert ("UpdateWeightsFromTensor" in steps) == (path == "auto")
    publisher.close()


def test_from_disk_the_weights_are_only_digested(fleet: Fleet, tmp_path: Path) -> None:
    publisher = fleet.publisher("actor")
    model = demo_tiny.make(seed=13)
    digest = rlctl.model_digest(model)
    demo_tiny.save(model, tmp_path / "saved")
    pending = publisher.update_async(model, version="from-disk", checkpoint=str(tmp_path / "saved"))
    pending.wait_sent()
    scramble(model)
    assert pending.wait().model_digest == digest
    assert held_by(fleet) == {digest}
    publisher.close()


@pytest.mark.parametrize("path", ["broadcast", "auto"])
def test_one_at_a_time_and_given_up_on_request(fleet: Fleet, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_rank, "HANGS_S", 0.5)
    publisher = fleet.publisher("actor", path=path)
    model = demo_tiny.make(seed=14)
    publisher.update(model, version=f"{path}-before")
    weights = Held(demo_tiny.make(seed=15))
    pending = publisher.update_async(weights, version=f"{path}-never")
    assert weights.reached.wait(60)
    for start in (publisher.update, publisher.update_async):
        with pytest.raises(RlctlError) as caught:
            start(model, version="second")
        assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
    assert pending.cancel()
    for wait in (pending.wait_sent, pending.wait):
        with pytest.raises(RlctlError) as caught:
            wait()
        assert caught.value.reason is Reason.CANCELLED
    assert pending.done()
    status = fleet.status().models[0]
    assert (status.latest.label, status.update_id) == (f"{path}-before", "")
    # The thread that goes through the weights is the trainer's: until it comes back nothing can be sent.
    with pytest.raises(RlctlError) as caught:
        publisher.update(model, version="too-early")
    assert caught.value.reason is Reason.ILLEGAL_STATE
    weights.go_on.set()
    retry_until_free(publisher, model, f"{path}-after")
    assert holds(held_by(fleet), model)
    publisher.close()


def retry_until_free(publisher: Publisher, model: Any, version: str) -> None:
    """The held thread ends a moment after it was let go."""
    under_way = publisher.aio._part._under_way
    assert under_way is not None

    async def ended() -> None:
        await asyncio.wait({under_way}, timeout=60)

    publisher._loop.call(ended())
    publisher.update(model, version=version)


def test_the_store_of_an_update_that_broke_off_stays_a_moment_for_ranks_on_their_way(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()
    closings = []

    def close(store: GroupStore) -> None:
        closings.append((time.monotonic(), store.address("127.0.0.1")))
        close_store(store)
        closed.set()

    close_store = GroupStore.close
    monkeypatch.setattr(GroupStore, "close", close)
    publisher = fleet.publisher("actor", path="broadcast")
    weights = Held(demo_tiny.make(seed=21))
    pending = publisher.update_async(weights, version="broken-off")
    assert weights.reached.wait(60)
    weights.go_on.set()
    cancelled_at = time.monotonic()
    pending.cancel()
    with pytest.raises(RlctlError, match="CANCELLED"):
        pending.wait()
    assert closed.wait(30)
    ((closed_at, address),) = closings
    assert closed_at - cancelled_at >= lead.LINGERS_S
    with socket.socket() as coming:
        assert coming.connect_ex(address) != 0
    publisher.update(demo_tiny.make(seed=22), version="whole-again")
    publisher.close()


def test_closing_ends_what_is_pending(fleet: Fleet) -> None:
    publisher = fleet.publisher("actor")
    weights = Held(demo_tiny.make(seed=16))
    pending = publisher.update_async(weights, version="closed", deadline_s=30)
    assert weights.reached.wait(60)
    publisher.close()
    assert pending.done()
    with pytest.raises(RlctlError) as caught:
        pending.wait()
    assert caught.value.reason is Reason.CANCELLED
    assert not fleet.status().models[0].update_id
    weights.go_on.set()
    another = fleet.publisher("actor")
    another.update(demo_tiny.make(seed=17), version="by-another")
    another.close()


def test_what_is_wrong_is_raised_by_both_waits(fleet: Fleet) -> None:
    publisher = fleet.publisher("actor")
    latest = fleet.status().models[0].latest
    bad = [("no.such.tensor", torch.zeros(2))]
    pending = publisher.update_async(bad, version="bad")
    for wait in (pending.wait_sent, pending.wait):
        with pytest.raises(RlctlError) as caught:
            wait()
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "weights")
    with pytest.raises(RlctlError) as caught:
        publisher.update_async(bad, version="bad", stream="main")  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "stream")
    with pytest.raises(TypeError, match="no_such_setting"):
        publisher.update_async(bad, version="bad", no_such_setting=1)
    assert fleet.status().models[0].latest == latest
    publisher.update(demo_tiny.make(seed=18), version="good")
    publisher.close()


def test_an_update_that_is_interrupted_holds_nothing_up(fleet: Fleet, interrupts: Callable[[], None]) -> None:
    model = demo_tiny.make(seed=17)
    with rlctl.connect(fleet.aio.connection.address) as trainer:
        publisher = trainer.publisher("actor")
        with pytest.raises(KeyboardInterrupt):
            publisher.update(Interrupted(model, interrupts), version="interrupted")
    publisher.close()
    assert fleet.status().models[0].update_id == "", "its lease is not waited for"
    # One that is pending when the fleet is closed is given up as well.
    with rlctl.connect(fleet.aio.connection.address) as trainer:
        weights = Held(model)
        pending = trainer.publisher("actor").update_async(weights, version="left")
        assert weights.reached.wait(60)
        assert fleet.status().models[0].update_id
    weights.go_on.set()
    assert pending.done()
    assert fleet.status().models[0].update_id == ""
    rlctl.publisher(fleet, "actor").update(model, version="after")
