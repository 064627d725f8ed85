"""Finding out how SGLang's ranks hold a checkpoint, from nothing but their checksums."""

from __future__ import annotations

import hashlib

import pytest
import torch
from rlctl_sglang.readback.parameter_layout import Joining, find_out

from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

Tensors = dict[str, torch.Tensor]


def checkpoint(*, kv_heads: int = 2, vocabulary: int = 20) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    return {
        "embed.weight": made(vocabulary, 16),
        "layer.self_attn.q_proj.weight": made(16, 16),
        "layer.self_attn.k_proj.weight": made(4 * kv_heads, 16),
        "layer.self_attn.v_proj.weight": made(4 * kv_heads, 16),
        "layer.self_attn.o_proj.weight": made(16, 16),
        "layer.mlp.gate_proj.weight": made(32, 16),
        "layer.mlp.up_proj.weight": made(32, 16),
        "layer.norm.weight": made(16),
    }


def held(tensors: Tensors, rank: int, ranks: int, kv_heads: int = 2) -> Tensors:
    """What a rank of SGLang's holds, cut the way that SGLang's layers cut."""

    def rows(name: str, shares: int = ranks, number: int = rank) -> torch.Tensor:
        return tensors[f"layer.{name}.weight"].chunk(shares)[number]

    attention, kv_shares = "self_attn", min(kv_heads, ranks)
    kv = rank * kv_shares // ranks
    embed = torch.zeros(64, 16, dtype=torch.bfloat16)
    embed[: len(tensors["embed.weight"])] = tensors["embed.weight"]
    qkv = [rows(f"{attention}.q_proj"), *(rows(f"{attention}.{name}", kv_shares, kv) for name in ("k_proj", "v_proj"))]
    return {
        "embed.weight": embed.chunk(ranks)[rank],
        "layer.self_attn.qkv_proj.weight": torch.cat(qkv),
        "layer.self_attn.o_proj.weight": tensors["layer.self_attn.o_proj.weight"].chunk(ranks, 1)[rank],
        "layer.mlp.gate_up_proj.weight": torch.cat([rows("mlp.gate_proj"), rows("mlp.up_proj")]),
        "layer.norm.weight": tensors["layer.norm.weight"],
    }


def checksums(parameters: Tensors) -> dict[str, str]:
    return {name: hashlib.sha256(as_bytes(t).numpy().data).hexdigest()[:16] for name, t in parameters.items()}


def metas(tensors: Tensors) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 2), (2, 1), (4, 2), (4, 4)])
def test_what_was_found_out_puts_other_weights_together_too(ranks: int, kv_heads: int) -> None:
    first = checkpoint(kv_heads=kv_heads)
    told = [checksums(held(first, rank, ranks, kv_heads)) for rank in range(ranks)]
    found = find_out(told, metas(first), first.__getitem__)
    assert [[parameter.name for parameter in rank] for rank in found] == [list(told[0])] * ranks
    later = {name: tensor * 2 + 1 for name, tensor in first.items()}
    joining = Joining(metas(first))
    full: Tensors = {}
    for parameters in zip(*found, strict=True):
        full |= joining.join([(p, held(later, rank, ranks, kv_heads)[p.name]) for rank, p in enumerate(parameters)])
    assert full.keys() == later.keys()
    assert all(torch.equal(full[name], later[name]) for name in later)
    assert not joining.inconsistent


def test_ranks_that_disagree_about_what_both_hold() -> None:
    first = checkpoint()
    found = find_out([checksums(held(first, rank, 2)) for rank in range(2)], metas(first), first.__getitem__)
    (norms,) = (pair for pair in zip(*found, strict=True) if pair[0].name == "layer.norm.weight")
    joining = Joining(metas(first))
    joining.join([(norms[0], first["layer.norm.weight"]), (norms[1], first["layer.norm.weight"] + 1)])
    assert joining.inconsistent == {"layer.norm.weight"}


@pytest.mark.parametrize("how", ["another value", "unknown", "left over", "ranks differ"])
def test_what_cannot_be_found_out_is_not_guessed(how: str) -> None:
    first = checkpoint()
    told = [checksums(held(first, rank, 2)) for rank in range(2)]
    reference = dict(first)
    if how == "another value":
        told[1]["layer.self_attn.o_proj.weight"] = "0" * 16
    elif how == "unknown":
        for each in told:
            each["layer.mlp.experts.w13_weight"] = "0" * 16
    elif how == "left over":
        reference["rotary.inv_freq"] = torch.ones(4)
    else:
        del told[1]["layer.norm.weight"]
    assert find_out(told, metas(reference), reference.__getitem__) == []
