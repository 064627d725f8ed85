"""A staged update at one rank of an engine server, over a toy model."""

from __future__ import annotations

import base64
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlctl_servers.ranks import shadow_copy
from rlctl_servers.ranks.endpoint import Endpoint
from rlctl_servers.ranks.model import MemoryMap, Places, RankModel
from rlctl_servers.ranks.protocol import LATER, POLL
from rlctl_servers.ranks.shadow_copy import ShadowCopy
from safetensors.torch import save_file

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.verbs import VERBS
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_UNKNOWN, ErrorDetail
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

OLD = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
NEW = {"a": torch.full((2, 3), 7.0), "b": torch.arange(4.0)}


class Toy(RankModel):
    """Two tensors in one fused parameter, whose last row is padding; and the hooks of an update.

    Attributes:
        breaks: the hook after a load fails.
    """

    product, rank, size = "Toy", 0, 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.fused = torch.zeros(12)
        for name, tensor in OLD.items():
            self.view(self.fused, name).copy_(tensor)
        self.fused[10:] = 99
        self.hooks: list[str] = []
        self.breaks = False

    @staticmethod
    def view(fused: torch.Tensor, name: str) -> torch.Tensor:
        return fused[:6].view(2, 3) if name == "a" else fused[6:10]

    def load(self, name: str, tensor: torch.Tensor) -> None:
        raise AssertionError("the loaders write what serves")

    def reload(self, request: v.UpdateWeightsFromDiskRequest) -> None:
        raise AssertionError("a load of the engine writes what serves")

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        return self.bind(reference, {"fused": self.fused})

    def bind(self, reference: Mapping[str, TensorMeta], parameters: Mapping[str, torch.Tensor]) -> ShardMap:
        if parameters["fused"].shape != (12,):
            raise Reason.INTERNAL.error("a different format")
        return ShardMap({name: Shard(meta, self.view(parameters["fused"], name)) for name, meta in reference.items()})

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        return MemoryMap(lambda: self.held(reference).shards, lambda: False, self)

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:
        def bind(parameters: Mapping[str, torch.Tensor]) -> ShardMap:
            return self.bind(reference, parameters)

        return ShadowCopy(lambda: {"fused": self.fused}, bind, device=self.device, ranks=self.size)

    def prepare_load(self, load: Load) -> None:
        self.hooks.append("prepare")

    def finalize_load(self, load: Load) -> None:
        self.hooks.append("finalize")
        if self.breaks:
            raise OSError("the kernel's weights cannot be packed")

    def abandon_load(self, load: Load) -> None:
        self.hooks.append("abandon")


class Driver:
    """The stage server's side of one rank.

    Attributes:
        polls: how often the answer of a call in the background was asked for.
    """

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self.endpoint = Endpoint(lambda: model)
        self.polls = 0
        reference = [[name, "torch.float32", list(tensor.shape)] for name, tensor in OLD.items()]
        self.raw("Attach", json.dumps({"reference": reference, "host": "127.0.0.1"}).encode())

    def begin(self, verb: str, request: bytes = b"", update_id: str = "u", number: str = "n") -> dict[str, Any]:
        answer = self.endpoint.call(number, verb, base64.b64encode(request).decode(), update_id, 10.0)
        assert answer["number"] == number
        return answer

    def raw(self, verb: str, request: bytes, update_id: str = "u") -> bytes:
        self.polls += 1
        number = f"{verb} {self.polls}"
        answer = self.begin(verb, request, update_id, number)
        while answer.get(LATER):
            self.polls += 1
            time.sleep(0.001)
            answer = self.begin(POLL, number.encode(), update_id, f"poll {self.polls}")
        if "error" in answer:
            error = from_detail(ErrorDetail.FromString(base64.b64decode(answer["error"])))
            error.outcome = answer["outcome"]
            raise error
        return base64.b64decode(answer["answer"])

    def tell(self, request: Any, update_id: str = "u") -> bytes:
        verb = next(verb.name for verb in VERBS.values() if verb.request is type(request))
        return self.raw(verb, request.SerializeToString(), update_id)

    def prepare(self, update_id: str = "u", **fields: Any) -> None:
        self.tell(v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED, **fields), update_id)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> v.WeightsReport:
        sender = SegmentSender(segment_bytes=4096)
        try:
            source = as_source(list(tensors.items()))
            (sent,) = sender.write(source, list(source.metas()), lease_s=10)
            report = v.WeightsReport.FromString(self.tell(v.UpdateWeightsFromTensorRequest(segments=sent.messages)))
            sent.release()
            return report
        finally:
            sender.close()

    def digest(self, *, shadow: bool = False) -> str:
        return v.CheckReport.FromString(self.tell(v.CheckWeightsRequest(shadow=shadow))).model_digest


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def driver(toy: Toy) -> Iterator[Driver]:
    made = Driver(toy)
    yield made
    rank = made.endpoint._rank
    assert rank is not None
    assert rank._groups is not None
    rank._groups.close()


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    model = ModelDigest()
    for name, tensor in tensors.items():
        model.add(name, tensor)
    return model.digest()


def refused(act: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as error:
        act()
    return error.value


def test_the_weights_change_at_the_commit_only_and_keep_their_memory(driver: Driver, toy: Toy) -> None:
    address = toy.fused.data_ptr()
    driver.prepare(digest_received=True)
    assert driver.send(NEW).tensors == 2
    assert (driver.digest(), toy.hooks) == (digest(OLD), [])
    sealed = v.WeightsReport.FromString(driver.tell(v.SealUpdateRequest()))
    assert sealed.received_digest == digest(NEW)
    assert (driver.digest(shadow=True), driver.digest()) == (digest(NEW), digest(OLD))
    driver.tell(v.CommitUpdateRequest())
    assert (driver.digest(), toy.fused.data_ptr()) == (digest(NEW), address)
    assert toy.hooks == ["prepare", "finalize"]
    assert (toy.fused[10:] == 99).all(), "what no tensor fills stays"
    assert refused(lambda: driver.digest(shadow=True)).reason is Reason.UPDATE_NOT_FOUND


def test_a_partial_update_keeps_the_other_tensors(driver: Driver) -> None:
    driver.prepare(kind=v.UPDATE_KIND_PARTIAL)
    driver.send({"b": NEW["b"]})
    driver.tell(v.SealUpdateRequest())
    assert driver.digest(shadow=True) == digest({"a": OLD["a"], "b": NEW["b"]})
    driver.tell(v.CommitUpdateRequest())
    assert driver.digest() == digest({"a": OLD["a"], "b": NEW["b"]})


def test_a_checkpoint_is_read_into_the_copy(driver: Driver, tmp_path: Path) -> None:
    save_file(NEW, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    driver.prepare()
    report = driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tmp_path)))
    assert v.WeightsReport.FromString(report).tensors == 2
    assert driver.digest() == digest(OLD)
    driver.tell(v.SealUpdateRequest())
    driver.tell(v.CommitUpdateRequest())
    assert driver.digest() == digest(NEW)


def test_steps_out_of_order_are_refused_and_touch_nothing(driver: Driver) -> None:
    assert refused(lambda: driver.tell(v.SealUpdateRequest())).reason is Reason.UPDATE_NOT_FOUND
    assert refused(lambda: driver.digest(shadow=True)).reason is Reason.UPDATE_NOT_FOUND
    driver.prepare()
    assert refused(lambda: driver.tell(v.CommitUpdateRequest())).reason is Reason.ILLEGAL_STATE
    driver.send({"a": NEW["a"]})
    error = refused(lambda: driver.tell(v.SealUpdateRequest()))
    assert (error.reason, error.outcome, error.metadata["missing"]) == (
        Reason.WEIGHTS_INCOMPLETE,
        OUTCOME_REJECTED,
        "b",
    )
    error = refused(lambda: driver.tell(v.UpdateWeightsFromTensorRequest(load_format="their.loader")))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "load_format")
    driver.send({"b": NEW["b"]})
    driver.tell(v.SealUpdateRequest())
    driver.tell(v.SealUpdateRequest())
    error = refused(lambda: driver.send(NEW))
    assert (error.reason, error.outcome) == (Reason.ILLEGAL_STATE, OUTCOME_REJECTED)
    assert driver.digest() == digest(OLD)


def test_an_abort_drops_the_copy_and_leaves_what_serves(
    driver: Driver, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[ShadowCopy]] = []
    make = toy.shadow

    def noted(reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:
        copy = make(reference, load)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(toy, "shadow", noted)
    driver.prepare()
    driver.send(NEW)
    driver.tell(v.AbortUpdateRequest())
    gc.collect()
    assert copies[0]() is None
    assert (driver.digest(), toy.hooks) == (digest(OLD), [])
    assert refused(lambda: driver.tell(v.SealUpdateRequest())).reason is Reason.UPDATE_NOT_FOUND
    driver.tell(v.PrepareUpdateRequest())  # in place
    driver.send(NEW)
    driver.tell(v.CommitUpdateRequest())
    assert driver.digest() == digest(NEW)


class Blocking:
    """Holds what is copied into a shadow copy, until :meth:`go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        place = ShardMap.place

        def placing(shards: ShardMap, name: str, full: torch.Tensor) -> None:
            self.begun.set()
            assert self.may_end.wait(10)
            place(shards, name, full)

        monkeypatch.setattr(ShardMap, "place", placing)


@pytest.fixture
def sent(driver: Driver) -> Iterator[bytes]:
    """A request whose segments hold the new weights."""
    sender = SegmentSender(segment_bytes=4096)
    source = as_source(list(NEW.items()))
    (segments,) = sender.write(source, list(source.metas()), lease_s=10)
    yield v.UpdateWeightsFromTensorRequest(segments=segments.messages).SerializeToString()
    segments.release()
    sender.close()


def test_the_engine_s_thread_is_free_while_tensors_come(
    driver: Driver, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.prepare()
    blocking = Blocking(monkeypatch)
    assert driver.begin("UpdateWeightsFromTensor", sent)[LATER]
    assert blocking.begun.wait(10)
    assert driver.digest() == digest(OLD), "other calls are carried out meanwhile"
    assert driver.begin(POLL, b"n", number="m")[LATER]
    blocking.may_end.set()
    while driver.begin(POLL, b"n", number="m").get(LATER):
        time.sleep(0.001)
    assert "answer" in driver.begin(POLL, b"n", number="m"), "another rank may still be at it"


def test_an_abort_ends_what_is_being_received(driver: Driver, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.prepare()
    blocking = Blocking(monkeypatch)
    driver.begin("UpdateWeightsFromTensor", sent)
    assert blocking.begun.wait(10)
    driver.tell(v.AbortUpdateRequest())
    blocking.may_end.set()
    while (answer := driver.begin(POLL, b"n", number="m")).get(LATER):
        time.sleep(0.001)
    assert answer["outcome"] == OUTCOME_REJECTED
    driver.prepare("next")
    assert driver.digest() == digest(OLD)


def test_a_failed_swap_leaves_weights_of_no_version(driver: Driver, toy: Toy) -> None:
    driver.prepare()
    driver.send(NEW)
    driver.tell(v.SealUpdateRequest())
    toy.breaks = True
    error = refused(lambda: driver.tell(v.CommitUpdateRequest()))
    assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, OUTCOME_DIRTY)
    assert "cannot be packed" in error.message
    driver.tell(v.AbortUpdateRequest())


def test_a_copy_that_did_not_arrive_is_named(driver: Driver, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.prepare()
    driver.send(NEW)
    driver.tell(v.SealUpdateRequest())
    real = ShadowCopy.targets

    def elsewhere(copy: ShadowCopy) -> dict[str, torch.Tensor]:
        def unchanged(target: torch.Tensor, source: torch.Tensor, **_: object) -> torch.Tensor:
            target[:6] = source[:6]
            return target

        targets = real(copy)
        monkeypatch.setattr(torch.Tensor, "copy_", unchanged)
        return targets

    monkeypatch.setattr(ShadowCopy, "targets", elsewhere)
    error = refused(lambda: driver.tell(v.CommitUpdateRequest()))
    monkeypatch.undo()
    assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, OUTCOME_DIRTY)
    assert "fused" in error.message


def test_parameters_of_another_form_are_refused_before_the_first_byte(driver: Driver, toy: Toy) -> None:
    driver.prepare()
    driver.send(NEW)
    driver.tell(v.SealUpdateRequest())
    toy.fused = torch.zeros(3)
    error = refused(lambda: driver.tell(v.CommitUpdateRequest()))
    assert (error.reason, error.outcome, toy.hooks) == (Reason.INTERNAL, OUTCOME_REJECTED, [])


def test_a_copy_that_fits_nowhere_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_copy, "available_bytes", lambda: 50)
    error = refused(driver.prepare)
    assert (error.reason, error.field, error.outcome) == (Reason.MEMORY_FULL, "apply", OUTCOME_REJECTED)
    assert "48 bytes are needed, 50" in error.message
    monkeypatch.undo()
    driver.prepare()
    assert driver.digest(shadow=True) == digest(OLD)


def test_a_full_device_puts_the_copy_into_page_locked_memory(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool]] = []

    def empty(*args: Any, device: torch.device, pin_memory: bool, **fields: Any) -> torch.Tensor:
        made.append((device.type, pin_memory))
        return torch.zeros(12)

    monkeypatch.setattr(torch, "empty_strided", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    for free, place in ((1000, ("cuda", False)), (147, ("cpu", True))):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1000))
        copy = ShadowCopy(lambda: {"fused": toy.fused}, lambda _: ShardMap({}), device=torch.device("cuda", 0), ranks=1)
        copy.allocate(lambda: None)
        assert made.pop() == place


def test_a_model_of_unknown_places_refuses_to_stage(monkeypatch: pytest.MonkeyPatch, driver: Driver, toy: Toy) -> None:
    monkeypatch.setattr(Toy, "shadow", RankModel.shadow)
    error = refused(driver.prepare)
    assert (error.reason, error.field, error.outcome) == (Reason.UNSUPPORTED, "apply", OUTCOME_REJECTED)
    assert error.next_step


def test_a_defect_in_the_background_is_an_answer(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(ShadowCopy, "allocate", fail)
    error = refused(driver.prepare)
    assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)
    assert "a defect" in error.message


def test_copies_have_the_strides_of_the_parameters() -> None:
    parameter = torch.arange(12.0).reshape(3, 4).t()
    seen: list[tuple[int, ...]] = []

    def bind(parameters: Mapping[str, torch.Tensor]) -> ShardMap:
        seen.append(parameters["p"].stride())
        meta = TensorMeta("p", torch.float32, (4, 3))
        return ShardMap({"p": Shard(meta, parameters["p"], Slice())})

    copy = ShadowCopy(lambda: {"p": parameter}, bind, device=torch.device("cpu"), ranks=1)
    copy.allocate(lambda: None)
    assert seen == [(1, 4), (1, 4)]
    assert torch.equal(copy.shards.shards["p"].local, parameter)
