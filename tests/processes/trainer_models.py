"""What trainers of several processes train: a dense model, and one whose experts lie at different ranks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlctl.demo import tiny


def make(kind: str, seed: int) -> Any:
    """A model in float32, its weights drawn from the seed: "dense", the demo's, or "experts", with four in each layer.

    Both have the demo's vocabulary.
    """
    if kind == "dense":
        return tiny.make(seed=seed)
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=tiny.PAD,
        bos_token_id=tiny.BOS,
        eos_token_id=tiny.EOS,
        dtype="float32",
    )
    model: Any = Qwen3MoeForCausalLM(config)
    return model.float()
