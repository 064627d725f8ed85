"""The steps of an update at one rank of an engine server, over a toy model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rlctl_servers.ranks.model import MemoryMap, Places, RankModel
from rlctl_servers.ranks.rank import Rank

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.buckets import pack, plan, to_proto
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.tensors import TensorMeta


class Toy(RankModel):
    """Two tensors, in memory that :meth:`move` puts elsewhere."""

    product, rank, size = "Toy", 0, 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.memory = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
        self.loader = ""
        self.loaded: list[str] = []
        self.asked_to_confirm = 0
        self.begun = 0

    def load(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.shape == self.memory[name].shape
        self.loaded.append(name)

    def reload(self, request: v.UpdateWeightsFromDiskRequest) -> None:
        raise OSError(f"{request.model_path} is gone")

    def use_loader(self, load_format: str) -> None:
        self.loader = load_format

    def confirm(self) -> None:
        self.asked_to_confirm += 1

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        return ShardMap({name: Shard(meta, self.memory[name]) for name, meta in reference.items()})

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        return MemoryMap(lambda: self.held(reference).shards, lambda: bool(self.loader), self)

    def prepare_load(self, load: Any) -> None:
        self.begun += 1

    def move(self) -> None:
        self.memory = {name: tensor.clone() for name, tensor in self.memory.items()}


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def rank(toy: Toy) -> Iterator[Rank]:
    made = Rank(toy)
    reference = [[name, "torch.float32", list(tensor.shape)] for name, tensor in toy.memory.items()]
    request = json.dumps({"reference": reference, "host": "127.0.0.1"}).encode()
    answer = made.call("1", "Attach", request, "", 5)
    assert isinstance(answer, bytes)
    description = json.loads(answer)
    assert (description["rank"], description["size"], description["learned"], description["confirmed"]) == (
        0,
        1,
        False,
        False,
    )
    yield made
    assert made._groups is not None
    made._groups.close()


def tell(rank: Rank, verb: str, request: Any, update_id: str = "u") -> bytes:
    answer = rank.call("2", verb, request.SerializeToString(), update_id, 5)
    assert isinstance(answer, bytes)
    return answer


def refused(act: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as error:
        act()
    return error.value


def digest(toy: Toy) -> str:
    model = ModelDigest()
    for name, tensor in toy.memory.items():
        model.add(name, tensor)
    return model.digest()


def meet(rank: Rank, expected: str, *, digests: bool = True) -> str:
    request = {"store": ["127.0.0.1", 1], "digest": digests, "expected": expected}
    answer = rank.call("2", "Meet", json.dumps(request).encode(), "", 5)
    assert isinstance(answer, bytes)
    said = json.loads(answer)
    assert said["unstaged"]
    return str(said["digest"])


def test_the_model_is_confirmed_by_the_digest_of_the_checkpoint_only(rank: Rank, toy: Toy) -> None:
    assert meet(rank, "00") == digest(toy)
    assert meet(rank, digest(toy), digests=False) == ""
    assert toy.asked_to_confirm == 0
    assert meet(rank, digest(toy)) == digest(toy)
    assert toy.asked_to_confirm == 1


def test_an_update_is_written_to_where_the_memory_is_now(rank: Rank, toy: Toy) -> None:
    toy.move()
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    rank._shards.place("b", torch.full((4,), 5.0))
    assert (toy.memory["b"] == 5).all()


def test_a_refused_write_changes_neither_the_loader_nor_the_weights(rank: Rank, toy: Toy) -> None:
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    handle = v.TensorHandle(name="no_such", dtype="torch.float32", shape=v.Shape(dims=[4]))
    segment = v.TensorSegment(shared_memory="rlctl-none", size=16, tensors=[handle])
    request = v.UpdateWeightsFromTensorRequest(segments=[segment], load_format="their.loader")
    error = refused(lambda: tell(rank, "UpdateWeightsFromTensor", request))
    assert error.outcome == OUTCOME_REJECTED
    assert (toy.loader, toy.loaded, toy.begun) == ("", [], 0)


def test_a_loader_does_not_outlive_its_update(rank: Rank, toy: Toy) -> None:
    toy.loader = "their.loader"
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    assert toy.loader == ""


def test_a_group_without_room_for_the_rank_is_refused_by_its_field(rank: Rank) -> None:
    request = v.InitWeightsUpdateGroupRequest(
        master_address="127.0.0.1", master_port=9, group_name="g", world_size=1, rank_offset=1
    )
    error = refused(lambda: tell(rank, "InitWeightsUpdateGroup", request))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "rank_offset")


def test_a_store_that_is_not_there_is_not_waited_for(rank: Rank) -> None:
    request = v.InitWeightsUpdateGroupRequest(
        master_address="127.0.0.1", master_port=9, group_name="g", world_size=2, rank_offset=1
    )
    assert refused(lambda: tell(rank, "InitWeightsUpdateGroup", request)).reason is Reason.UNREACHABLE


def test_a_check_lists_tensors_and_digests_what_is_not_left_out(rank: Rank, toy: Toy) -> None:
    def check(**fields: Any) -> v.CheckReport:
        return v.CheckReport.FromString(tell(rank, "CheckWeights", v.CheckWeightsRequest(**fields)))

    whole = check(per_tensor=True)
    assert whole.model_digest == digest(toy)
    assert [tensor.name for tensor in whole.model_tensors] == ["a", "b"]
    assert (whole.tensor_count, check(skip_tensors=["b"]).tensor_count) == (2, 1)
    assert check(skip_tensors=["b"]).rank_digest != whole.rank_digest
    assert not check(model_digest=False).model_digest
    assert check(model_digest=False).rank_digest == whole.rank_digest
    both = v.CheckWeightsRequest(per_tensor=True, skip_tensors=["b"])
    assert refused(lambda: tell(rank, "CheckWeights", both)).field == "skip_tensors"


def test_a_commit_without_every_tensor_names_the_missing_ones(rank: Rank) -> None:
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    error = refused(lambda: tell(rank, "CommitUpdate", v.CommitUpdateRequest()))
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_REJECTED)
    assert error.metadata["missing"] == "a\nb"


@pytest.fixture
def source(rank: Rank) -> Iterator[WeightGroup]:
    """The source of a group "g" with the rank."""
    store = GroupStore()
    request = v.InitWeightsUpdateGroupRequest(
        master_address="127.0.0.1", master_port=store.port, group_name="g", world_size=2, rank_offset=1, backend="gloo"
    )
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(join, store, name="g", rank=0, world_size=2, timeout_s=10)
        tell(rank, "InitWeightsUpdateGroup", request)
        group = joining.result()
    yield group
    group.close()
    store.close()


def receive(rank: Rank, source: WeightGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let the rank receive tensors in a packed bucket, which does not go into place directly."""
    (bucket,) = plan([TensorMeta.of(name, tensor) for name, tensor in tensors.items()])
    request = v.UpdateWeightsFromDistributedRequest(group_name="g", buckets=[to_proto(bucket)])
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(source.broadcast, pack(bucket, tensors))
        tell(rank, "UpdateWeightsFromDistributed", request)
        sending.result()


@pytest.mark.parametrize("end", ["AbortUpdate", "CommitUpdate"])
def test_an_update_that_ends_keeps_no_memory_for_its_buckets(
    rank: Rank, toy: Toy, source: WeightGroup, end: str
) -> None:
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    receive(rank, source, {name: torch.zeros_like(tensor) for name, tensor in toy.memory.items()})
    assert rank._receiver._buffer is not None
    tell(rank, end, VERBS[end].request())
    assert rank._receiver._buffer is None


def test_weights_that_a_given_up_broadcast_may_still_change_are_not_committed(
    rank: Rank, toy: Toy, source: WeightGroup
) -> None:
    tell(rank, "PrepareUpdate", v.PrepareUpdateRequest())
    receive(rank, source, {name: torch.zeros_like(tensor) for name, tensor in toy.memory.items()})
    rank._receiver._late = late = Mock(under_way=True)  # an earlier broadcast of the same update, to the same memory
    error = refused(lambda: tell(rank, "CommitUpdate", v.CommitUpdateRequest()))
    assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, OUTCOME_DIRTY)
    late.under_way = False
    tell(rank, "CommitUpdate", v.CommitUpdateRequest())
