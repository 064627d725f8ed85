"""verl's training engines as weights. The rest of what is verl's is run by tests/dialects/test_clients.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from rlctl.contract.errors import Unsupported
from rlctl.integrations.verl import incarnations
from rlctl.integrations.verl.weights import TrainingWeights
from rlctl.v1.fleet_pb2 import Fleet, Model
from rlctl.weights.tensor.source import WeightSource, left_out, spares_of
from rlctl.weights.tensor.tied_names import Spare


class Engine:
    """What verl's FSDP engine gives: the state, once, tied tensors under both names."""

    def __init__(self, module: LlamaForCausalLM, peft_config: Any = None) -> None:
        self.module = module
        self.passes = 0
        self._peft_config = peft_config

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        self.passes += 1
        return iter(self.module.state_dict().items()), self._peft_config


def llama(*, tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_tensors_are_the_checkpoints_in_every_pass(tied: bool, tmp_path: Path) -> None:
    model = llama(tied=tied)
    model.save_pretrained(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    engine = Engine(model)
    weights = TrainingWeights(engine)
    assert isinstance(weights, WeightSource)
    given = {meta.name for meta in weights.metas()}
    assert given - left_out(spares_of(weights), names) == names
    assert given - left_out(spares_of(weights), given) == given, "a checkpoint may keep what is tied"
    for _ in range(2):
        assert [name for name, _ in weights.tensors()] == [meta.name for meta in weights.metas()]
    assert engine.passes == 3


def test_under_fsdp_1_the_module_is_wrapped() -> None:
    model = llama(tied=True)
    engine = Engine(model)
    engine.module = SimpleNamespace(_fsdp_wrapped_module=model, state_dict=model.state_dict)  # type: ignore[assignment]
    assert spares_of(TrainingWeights(engine)) == {"lm_head.weight": Spare(("model.embed_tokens.weight",))}


def test_adapters_are_to_be_merged() -> None:
    with pytest.raises(Unsupported, match="Set it to true"):
        TrainingWeights(Engine(llama(tied=False), peft_config=object()))


def test_a_trainer_that_starts_is_newer_than_the_one_before_also_by_a_slower_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [Model(name="actor", trainer_incarnation=5000), Model(name="critic", trainer_incarnation=9000)]
    fleet: Any = SimpleNamespace(status=lambda: Fleet(models=models))
    for now, incarnation in ((7000.0, 7000), (4000.0, 5001)):
        monkeypatch.setattr(incarnations.time, "time", lambda now=now: now)
        assert incarnations.next_incarnation(fleet, "actor") == incarnation
