"""Parts of tensors as views of parameters, over copies of the parameters."""

from __future__ import annotations

import pytest
import torch
from rlctl_servers.ranks.parameter_views import ParameterViews

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.shards.shard_map import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta


def part(name: str, local: torch.Tensor, slice_: Slice | None = None, *shape: int) -> Shard:
    return Shard(TensorMeta(name, torch.float32, shape or tuple(local.shape)), local, slice_ or Slice())


def copies(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype).copy_(each)
        for name, each in parameters.items()
    }


def test_fused_cut_and_transposed_parts_are_found_in_copies() -> None:
    whole = torch.arange(48.0)
    parameters = {"qkv": whole[:24].view(6, 4), "head": whole[24:].view(4, 6).t(), "other": torch.ones(2)}
    parts = {
        "q": part("q", parameters["qkv"][:4]),
        "k": part("k", parameters["qkv"][4:]),
        "head": part("head", parameters["head"][:5], Slice(0, 5, 5), 10, 4),
    }
    views = ParameterViews(parts, parameters)
    assert sorted(views.written(parameters)) == ["head", "qkv"], "two parameters of one storage are two"
    made = copies(views.written(parameters))
    bound = views.bind(made).shards
    for name, each in parts.items():
        assert torch.equal(bound[name].local, each.local)
        assert (bound[name].slice, bound[name].meta) == (each.slice, each.meta)
    bound["k"].local.fill_(7)
    assert (made["qkv"][4:] == 7).all()
    assert not (parameters["qkv"] == 7).all()
    assert views.bind(parameters).shards["k"].local.data_ptr() == parameters["qkv"][4:].data_ptr()


def test_what_is_packed_is_named() -> None:
    parameter = torch.randn(4, 4)
    for local in (parameter.clone(), torch.empty(0)):
        with pytest.raises(RlctlError) as refused:
            ParameterViews({"w": part("w", parameter), "packed": part("packed", local)}, {"w": parameter})
        assert refused.value.reason is Reason.UNSUPPORTED
        assert "packed is not stored" in refused.value.message


@pytest.mark.parametrize("now", [None, torch.randn(4, 5), torch.randn(4, 4).t(), torch.ones(4, 4).double()])
def test_parameters_of_another_form_are_refused(now: torch.Tensor | None) -> None:
    parameter = torch.randn(4, 4)
    views = ParameterViews({"w": part("w", parameter[:2])}, {"w": parameter})
    with pytest.raises(RlctlError) as refused:
        views.bind({} if now is None else {"w": now})
    assert refused.value.reason is Reason.INTERNAL
    assert "parameter w" in refused.value.message
