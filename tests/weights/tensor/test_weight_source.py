"""What a trainer may hand over as the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Placement
from torch.distributed.tensor import distribute_tensor

from rlctl.contract.errors import InvalidRequest
from rlctl.weights.tensor.source import WeightSource, as_source, check_given
from rlctl.weights.tensor.tensors import TensorMeta


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("tied", self.norm.running_mean)


def test_a_module_yields_its_state_with_tied_tensors_once() -> None:
    model = Model()
    source = as_source(model)
    names = ["embed.weight", "norm.weight", "norm.bias", "tied", "norm.running_var", "norm.num_batches_tracked"]
    assert [meta.name for meta in source.metas()] == names
    assert source.metas()[0] == TensorMeta("embed.weight", torch.float32, (3, 2))
    for _ in range(2):
        tensors = dict(source.tensors())
        assert list(tensors) == names
        assert not any(tensor.requires_grad for tensor in tensors.values())
    with torch.no_grad():
        model.embed.weight.fill_(5)
    assert dict(source.tensors())["embed.weight"].eq(5).all()


def test_a_generator_can_be_gone_through_again() -> None:
    source = as_source((f"t{index}", torch.full((2,), float(index))) for index in range(3))
    assert [meta.name for meta in source.metas()] == ["t0", "t1", "t2"]
    assert list(dict(source.tensors())) == list(dict(source.tensors())) == ["t0", "t1", "t2"]


class Own:
    def metas(self) -> list[TensorMeta]:
        return []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())


def test_a_source_stays_what_it_is() -> None:
    source = Own()
    assert isinstance(source, WeightSource)
    assert as_source(source) is source


@pytest.mark.parametrize("entries", [[torch.zeros(1)], [("w", 3)], [(1, torch.zeros(1))], ["ab"], [("a",)]])
def test_what_is_no_pair_of_name_and_tensor_is_refused(entries: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="pairs of name and tensor") as caught:
        as_source(entries)  # type: ignore[arg-type]
    assert caught.value.field == "weights"


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'w' appears twice"):
        as_source([("w", torch.zeros(1)), ("w", torch.zeros(1))])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (lambda: torch.zeros(4, 2).numpy(), "the source gives <class 'numpy.ndarray'> for w; it must be a tensor"),
        (lambda: torch.zeros(4, 2, device="meta"), "w is on the meta device: it has no contents"),
        (lambda: torch.zeros(4, 2).to_sparse(), "w is of layout torch.sparse_coo: it has no contents"),
        (lambda: distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Placement(0)]), "w is a DTensor"),
    ],
    ids=["numpy", "meta", "sparse", "dtensor"],
)
def test_what_is_no_tensor_with_its_contents_is_told_by_name(given: Callable[[], Any], what: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidRequest, match=what) as caught:
            check_given(given(), TensorMeta("w", torch.float32, (4, 2)))
        assert caught.value.field == "weights"
    finally:
        dist.destroy_process_group()


def test_distributed_tensors_are_gathered() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        full = torch.arange(8.0).reshape(4, 2)
        source = as_source([("w", distribute_tensor(full, init_device_mesh("cpu", (1,)), [Placement(0)]))])
        assert source.metas() == [TensorMeta("w", torch.float32, (4, 2))]
        (gathered,) = dict(source.tensors()).values()
        assert type(gathered) is torch.Tensor
        assert torch.equal(gathered, full)
    finally:
        dist.destroy_process_group()
