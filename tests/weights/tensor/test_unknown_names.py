"""Weights are named by the checkpoint that the engines serve: tied tensors, experts, wrappers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.trainer.bucket_plan import Offered, fit
from rlctl.weights.formats.block_fp8 import BlockFp8
from rlctl.weights.tensor.checkpoint_names import ModuleSource
from rlctl.weights.tensor.source import Weights, as_offer, as_source, only, spares_of
from rlctl.weights.tensor.tensors import TensorMeta

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def llama(*, tied: bool) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=tied))


TIED = llama(tied=True)
USUAL = ModuleSource(TIED).metas()
WITH_HEAD = [*USUAL, TensorMeta(HEAD, torch.float32, (24, 16))]
HEAD_ALONE = [meta for meta in WITH_HEAD if meta.name != EMBEDDING]


def sent(weights: Weights, reference: list[TensorMeta], *, partial: bool = False) -> dict[str, torch.Tensor]:
    """What goes over the wire to engines that serve a checkpoint with these tensors."""
    source = as_offer(weights)
    (wire,) = fit("actor", [Offered(source.metas(), [], "", spares=spares_of(source))], reference, partial)
    tensors = dict(only(source, {meta.name for meta in wire.metas}).tensors())
    assert list(tensors) == [meta.name for meta in wire.metas]
    return tensors


def refused(weights: Weights, reference: list[TensorMeta]) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        sent(weights, reference)
    return caught.value


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor in memory of its own, as after ``.cpu()``."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("reference", [USUAL, WITH_HEAD, HEAD_ALONE], ids=["without", "both", "head-alone"])
@pytest.mark.parametrize(
    "weights",
    [TIED, list(TIED.state_dict().items()), list(copied(TIED.state_dict()).items())],
    ids=["module", "same-memory", "same-contents"],
)
def test_a_tied_tensor_comes_under_the_names_that_the_checkpoint_has(
    weights: Weights, reference: list[TensorMeta]
) -> None:
    tensors = sent(weights, reference)
    assert sorted(tensors) == sorted(meta.name for meta in reference)
    assert all(torch.equal(tensors[name], TIED.lm_head.weight) for name in {HEAD, EMBEDDING} & tensors.keys())


def test_without_a_reference_a_tied_tensor_comes_once_and_what_is_given_comes_as_it_is() -> None:
    assert sorted(sent(TIED, [])) == sorted(meta.name for meta in USUAL)
    assert sorted(sent(list(TIED.state_dict().items()), [])) == sorted(meta.name for meta in WITH_HEAD)


def test_a_tied_head_that_another_source_has_is_sent_by_that_one() -> None:
    first, last = as_offer(TIED), as_offer([(HEAD, TIED.lm_head.weight)])
    offers = [Offered(source.metas(), [], "", spares=spares_of(source)) for source in (first, last)]
    wire = fit("actor", offers, WITH_HEAD, partial=False)
    assert [HEAD in {meta.name for meta in offered.metas} for offered in wire] == [False, True]


def test_equal_matrices_of_one_value_are_not_taken_for_tied() -> None:
    pairs = [("lora_A", torch.zeros(2, 2)), ("lora_B", torch.zeros(2, 2))]
    assert spares_of(as_offer(pairs)) == {}


def test_a_head_of_other_contents_is_not_taken_for_a_repetition() -> None:
    state = copied(TIED.state_dict())
    state[HEAD][0, 0] += 1
    error = refused(list(state.items()), USUAL)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "weights")
    assert f"has no tensor {HEAD!r}" in error.message
    untied = llama(tied=False)
    assert HEAD in refused(untied, USUAL).message


def test_experts_come_as_the_checkpoint_has_them() -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, num_local_experts=3, tie_word_embeddings=False))
    apart = [TensorMeta.of(name, tensor) for name, tensor in as_source(model).tensors()]
    together = [TensorMeta.of(name, tensor) for name, tensor in model.state_dict().items()]
    assert {meta.name for meta in apart} != {meta.name for meta in together}
    for reference in (apart, together):
        assert sorted(sent(model, reference)) == sorted(meta.name for meta in reference)


def test_a_quantising_source_goes_by_its_reference_too() -> None:
    assert sorted(name for name, _ in BlockFp8(TIED, WITH_HEAD).tensors()) == sorted(meta.name for meta in WITH_HEAD)


class Holding(nn.Module):
    """A trainer's own module, which holds a model and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model


class WithValues(Holding):
    """And a head of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.values = nn.Linear(2, 1)


def wrapped(how: str) -> nn.Module:
    model = copy.deepcopy(TIED)
    match how:
        case "compiled":
            return torch.compile(model)  # type: ignore[return-value]
        case "parallel":
            return nn.DataParallel(model)
        case "both":
            return nn.DataParallel(torch.compile(model))  # type: ignore[arg-type]
        case "held":
            return Holding(model)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["compiled", "parallel", "both", "held", "a-layer-compiled"])
def test_a_wrapped_module_is_the_module_inside(how: str) -> None:
    module = wrapped(how)
    assert sorted(sent(module, WITH_HEAD)) == sorted(meta.name for meta in WITH_HEAD)
    assert rlctl.model_digest(module) == rlctl.model_digest(TIED)


def test_a_module_with_adapters_is_refused() -> None:
    model = copy.deepcopy(TIED)
    model.peft_config = {"default": object()}
    for give in (rlctl.model_digest, lambda module: sent(module, USUAL)):
        with pytest.raises(RlctlError) as caught:
            give(Holding(model))
        assert caught.value.reason is Reason.UNSUPPORTED
        assert "merge_and_unload" in caught.value.next_step


def test_the_names_that_a_wrapper_adds_to_are_counted_and_one_is_told() -> None:
    error = refused(WithValues(TIED), USUAL)
    count, total = len(USUAL), len(USUAL) + 2
    assert error.message == (
        f"actor has no tensor 'policy.{EMBEDDING}': {count} of {total} names hold 'policy.', and 'policy.{EMBEDDING}' "
        f"is '{EMBEDDING}' there"
    )
    assert "inside the wrapper" in error.next_step


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        (lambda name: f"module.{name}", "'module.'"),
        (lambda name: f"base_model.model.{name}", "'base_model.model.'"),
        (lambda name: name.replace("layers.0.", "layers.0._orig_mod."), "'_orig_mod.'"),
    ],
    ids=["front", "two-words", "amid"],
)
def test_names_with_what_a_wrapper_added_are_told_with_their_number(added: Any, shown: str) -> None:
    named = [(added(meta.name), torch.zeros(meta.shape)) for meta in USUAL]
    error = refused(named, USUAL)
    changed = sum(added(meta.name) != meta.name for meta in USUAL)
    assert f"{changed} of {len(USUAL)} names hold {shown}, and " in error.message
    assert "there" in error.message


def test_names_of_a_part_of_the_model_are_told_what_they_lack() -> None:
    error = refused(TIED.model, USUAL)
    assert f"names lack 'model.' in front, and 'embed_tokens.weight' is {EMBEDDING!r} there" in error.message


def test_the_nearest_name_is_told() -> None:
    named = [(meta.name, torch.zeros(meta.shape)) for meta in USUAL] + [("model.norm.wieght", torch.zeros(16))]
    error = refused(named, USUAL)
    assert error.message == "actor has no tensor 'model.norm.wieght'; the nearest to it is 'model.norm.weight'"


def test_a_digest_can_be_that_of_a_fleet_whose_checkpoint_names_tensors_otherwise(tmp_path: Any) -> None:
    tensors = copied({name: tensor.bfloat16() for name, tensor in TIED.state_dict().items()})
    save_file(tensors, tmp_path / "model.safetensors")
    TIED.config.save_pretrained(tmp_path)
    assert rlctl.model_digest(TIED, checkpoint=str(tmp_path)) == rlctl.model_digest(list(tensors.items()))
    assert rlctl.model_digest(TIED) != rlctl.model_digest(TIED, checkpoint=str(tmp_path))
