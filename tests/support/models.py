"""Tiny models with different weights, and their output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlctl.demo import tiny
from rlctl.weights.tensor.source import as_source


def changed(model: Any, seed: int, scale: float = 0.05) -> Any:
    """Return the model with different weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return other


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy output of transformers."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def mixture_of_experts() -> Any:
    """Return a Qwen3-MoE of two layers and four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
        initializer_range=0.25,
        dtype="float32",
    )
    made: Any = Qwen3MoeForCausalLM(config)
    return made.float().eval()


class Halfway:
    """A model's tensors, with a callback after the first five."""

    def __init__(self, model: Any, then: Callable[[], None]) -> None:
        self._source = as_source(model)
        self._then = then

    def metas(self) -> Any:
        return self._source.metas()

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(self._source.tensors()):
            if count == 5:
                self._then()
            yield pair
