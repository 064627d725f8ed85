"""Ranks of one server that work together: an error of one rank ends the work of all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from rlctl_servers.ranks import checks, rank_exchange
from rlctl_servers.ranks.model import Places, RankModel
from rlctl_servers.ranks.rank import Rank
from rlctl_servers.ranks.rank_exchange import Together
from rlctl_servers.ranks.shadow_copy import ShadowCopy

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import verbs_pb2 as v
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.group.rank_groups import Groups
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.tensors import TensorMeta

TIMEOUT_S = 60.0
"""Time of a call. No rank may wait for it."""

SOON_S = 20.0
FULL = torch.arange(8.0).reshape(4, 2)


def at_all(acts: list[Callable[[], Any]]) -> list[Any]:
    """Run an act for each rank at the same time; return results and errors by rank, all within a short time."""
    started = time.monotonic()
    with ThreadPoolExecutor(len(acts)) as ranks:
        outcomes = [future.exception() or future.result() for future in [ranks.submit(act) for act in acts]]
    assert time.monotonic() - started < SOON_S, outcomes
    return outcomes


class Half(RankModel):
    """Half of a tensor at each of two ranks. ``defect``: raised when the weights are read."""

    product, size = "Toy", 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self.part = Slice(0, 2 * rank, 2)
        self.local = self.part.of(FULL).clone()
        self.defect: Exception | None = None

    def load(self, name: str, tensor: torch.Tensor) -> None: ...

    def reload(self, request: v.UpdateWeightsFromDiskRequest) -> None: ...

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        if self.defect is not None:
            raise self.defect
        return ShardMap({name: Shard(meta, self.local, self.part) for name, meta in reference.items()})

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        return Places({name: Shard(meta, self.local, self.part) for name, meta in reference.items()})

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:
        def bind(parameters: Mapping[str, torch.Tensor]) -> ShardMap:
            return ShardMap({"t": Shard(reference["t"], parameters["t"], self.part)})

        return ShadowCopy(lambda: {"t": self.local}, bind, device=self.device, ranks=self.size)

    def abandon_load(self, load: Load) -> None: ...


@pytest.fixture
def halves() -> list[Half]:
    return [Half(0), Half(1)]


@pytest.fixture
def ranks(halves: list[Half]) -> Iterator[list[Rank]]:
    made = [Rank(half) for half in halves]
    attach = json.dumps({"reference": [["t", "torch.float32", [4, 2]]], "host": "127.0.0.1"}).encode()
    descriptions = [rank.call("1", "Attach", attach, "", TIMEOUT_S) for rank in made]
    store = json.loads(descriptions[0])["store"]  # type: ignore[arg-type]
    meet = json.dumps({"store": store, "digest": False, "expected": ""}).encode()
    at_all([lambda rank=rank: rank.call("2", "Meet", meet, "", TIMEOUT_S) for rank in made])
    yield made
    for rank in made:
        assert rank._groups is not None
        rank._groups.close()


def answers(ranks: list[Rank], number: str, verb: str, request: Message, update_id: str = "") -> list[Any]:
    """Call all ranks at the same time, and wait for work in the background."""

    def call(rank: Rank) -> bytes:
        answer = rank.call(number, verb, request.SerializeToString(), update_id, TIMEOUT_S)
        return answer.result(TIMEOUT_S) if isinstance(answer, Future) else answer

    return at_all([lambda rank=rank: call(rank) for rank in ranks])


def checksums(ranks: list[Rank], number: str, **fields: Any) -> list[Any]:
    return answers(ranks, number, "CheckWeights", v.CheckWeightsRequest(action=v.CHECK_ACTION_CHECKSUM, **fields))


def refused_by(errors: list[Any], failing: int, reason: Reason, message: str) -> None:
    """Both ranks raise the error of one rank."""
    assert [error.reason for error in errors] == [reason] * 2, errors
    assert message in errors[failing].message
    assert errors[1 - failing].message == f"rank {failing}: {errors[failing].message}"


@pytest.mark.parametrize("failing", [0, 1])
def test_every_rank_reports_the_defect_of_one_rank(ranks: list[Rank], halves: list[Half], failing: int) -> None:
    halves[failing].defect = AttributeError("no such parameter")
    refused_by(checksums(ranks, "3"), failing, Reason.ENGINE_FAILED, "AttributeError: no such parameter")
    halves[failing].defect = None
    digests = {v.CheckReport.FromString(answer).model_digest for answer in checksums(ranks, "4")}
    assert len(digests) == 1, "the ranks are together after the error"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("verb", ["CheckWeights", "SendWeights"])
def test_a_rank_without_a_tensor_refuses_together_with_the_other_ranks(
    ranks: list[Rank], failing: int, verb: str
) -> None:
    ranks[failing]._shards = Places({})
    bucket = v.TensorBucket(names=["t"], dtypes=["float32"], shapes=[v.Shape(dims=[4, 2])])
    requests: dict[str, Message] = {
        "CheckWeights": v.CheckWeightsRequest(action=v.CHECK_ACTION_READ, tensor="t", rows=1),
        "SendWeights": v.SendWeightsRequest(group_name="out", buckets=[bucket]),
    }
    refused_by(answers(ranks, "3", verb, requests[verb]), failing, Reason.FIELD_INVALID, "t")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_the_staged_update_refuses_together_with_the_other_ranks(
    ranks: list[Rank], failing: int
) -> None:
    prepare = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED)
    answers([ranks[1 - failing]], "3", "PrepareUpdate", prepare, "u1")
    check = v.CheckWeightsRequest(shadow=True)
    errors = answers(ranks, "4", "CheckWeights", check, "u1")
    refused_by(errors, failing, Reason.UPDATE_NOT_FOUND, "no staged update u1 is open at this rank")
    answers([ranks[failing]], "5", "PrepareUpdate", prepare, "u1")
    digests = {
        v.CheckReport.FromString(answer).model_digest for answer in answers(ranks, "6", "CheckWeights", check, "u1")
    }
    assert len(digests) == 1, "the ranks are together after the error"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("work", ["difference", "tensor_digests"])
def test_an_error_after_the_model_digest_is_raised_at_every_rank(
    ranks: list[Rank], failing: int, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(checks, work)

    def fails(first: Any, *rest: Any) -> Any:
        local = first.shards["t"].local if work == "difference" else first["t"][0]
        if local.data_ptr() == ranks[failing]._model.local.data_ptr():  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("no room")
        return real(first, *rest)

    monkeypatch.setattr(checks, work, fails)
    errors = checksums(ranks, "3", fingerprints=b"12345678")
    refused_by(errors, failing, Reason.MEMORY_FULL, "no room")


def test_a_broadcast_that_fails_ends_a_send_at_every_rank(ranks: list[Rank]) -> None:
    """Rank 0 alone is in the group of the receivers; the other ranks only gather."""
    store = GroupStore()
    joining = v.InitWeightsUpdateGroupRequest(
        group_name="out", master_address="127.0.0.1", master_port=store.port, world_size=2, num_ranks=1, backend="gloo"
    ).SerializeToString()
    receiver: list[WeightGroup] = []

    def receive() -> None:
        receiver.append(join(store, name="out", rank=1, world_size=2, timeout_s=SOON_S))

    at_all([*(lambda rank=rank: rank.call("3", "InitWeightsUpdateGroup", joining, "", 20) for rank in ranks), receive])
    receiver[0].close()
    bucket = v.TensorBucket(names=["t"], dtypes=["float32"], shapes=[v.Shape(dims=[4, 2])])
    request = v.SendWeightsRequest(group_name="out", buckets=[bucket])
    errors = answers(ranks, "4", "SendWeights", request)
    assert [error.reason for error in errors] == [Reason.GROUP_FAILED] * 2
    store.close()


def test_a_rank_may_work_longer_between_two_messages_than_the_ranks_wait_for_each_other_to_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search for places loads the model several times, and a send waits for the receivers."""
    monkeypatch.setattr(rank_exchange, "MEET_S", 2.0)
    groups = [Groups("127.0.0.1") for _ in range(2)]
    store = groups[0].store_address

    def work(rank: int) -> list[bytes]:
        together = Together(groups[rank], rank, 2)
        together.store = store
        with together.exchanging("1", TIMEOUT_S) as exchange:
            exchange.all_gather_bytes(b"met")
            if rank:
                time.sleep(rank_exchange.MEET_S + 1)
            parts = [torch.zeros(1, dtype=torch.uint8)] * 2
            exchange.gather(exchange.buffers(parts[rank], [1, 1], 0), 0)
            if rank:
                time.sleep(rank_exchange.MEET_S + 1)
            return exchange.all_gather_bytes(str(rank).encode())

    assert at_all([lambda rank=rank: work(rank) for rank in range(2)]) == [[b"0", b"1"]] * 2
    for each in groups:
        each.close()


def test_a_rank_that_leaves_ends_the_wait_of_all_other_ranks() -> None:
    """In a ring of four, the rank opposite waits for ranks that have failed already."""
    size = 4
    groups = [Groups("127.0.0.1") for _ in range(size)]
    store = groups[0].store_address
    entered = threading.Barrier(size)

    def work(rank: int) -> None:
        together = Together(groups[rank], rank, size)
        together.store = store
        with together.exchanging("1", TIMEOUT_S) as exchange:
            exchange.all_gather_bytes(b"x")
            entered.wait(SOON_S)
            if rank == size - 1:
                raise KeyError("defect")
            exchange.all_gather_bytes(b"y" * 100_000)

    *others, failed = at_all([lambda rank=rank: work(rank) for rank in range(size)])
    assert isinstance(failed, KeyError)
    assert [error.reason for error in others if isinstance(error, RlctlError)] == [Reason.GROUP_FAILED] * 3
    for each in groups:
        each.close()
