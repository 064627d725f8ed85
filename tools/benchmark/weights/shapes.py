"""Models in the shapes of real models, with random weights: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlctl.weights.tensor.finite import Held
from rlctl.weights.tensor.tensors import TensorMeta

_NOISE = 1 << 22
"""Number of random elements that fill the tensors repeatedly: their values do not matter for speed."""


@dataclass(frozen=True)
class Shape:
    """A causal language model of the Qwen3 family.

    Attributes:
        layers: number of layers.
        hidden, intermediate: widths of the residual stream and of the MLP.
        heads, kv_heads, head_dim: attention.
        vocabulary: tokens; the embedding is tied to the head.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def metas(self) -> list[TensorMeta]:
        """Return every tensor of the checkpoint, bfloat16, in the model's order."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm"] = (self.hidden,)
        return [TensorMeta(f"{name}.weight", torch.bfloat16, shape) for name, shape in shapes.items()]

    def config(self) -> dict[str, Any]:
        """Return the checkpoint's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        }


QWEN3_0_6B = Shape(28, 1024, 3072, 16, 8, 128, 151936)
"""Qwen3-0.6B: 311 tensors, 596 million parameters, 1.11 GiB."""

QWEN3_4B = Shape(36, 2560, 9728, 32, 8, 128, 151936)
"""Qwen3-4B: 398 tensors, 4.02 billion parameters, 7.49 GiB."""

ONE_LAYER = Shape(1, 1024, 3072, 16, 8, 128, 4096)
"""A layer of this family with a small vocabulary, 38 MiB: for smoke tests."""

SMALL_TENSORS = Shape(72, 128, 256, 4, 4, 64, 256)
"""505 matrices of 64 KiB, and norms."""


class Synthetic:
    """A weight source of one shape. The tensors are in the device's memory."""

    stable = True

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        noise = torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16().to(device)
        self.weights = {meta.name: _filled(meta, noise) for meta in shape.metas()}

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors, bytes."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def metas(self) -> list[TensorMeta]:
        """Return every tensor's description."""
        return [TensorMeta.of(name, tensor) for name, tensor in self.weights.items()]

    def local(self) -> Iterator[Held]:
        """Yield the tensors; no rank has to gather."""
        return (((name,), tensor) for name, tensor in self.weights.items())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors."""
        yield from self.weights.items()


def save(shape: Shape, weights: Mapping[str, torch.Tensor], directory: Path) -> Path:
    """Write a checkpoint; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    save_file(dict(weights), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _filled(meta: TensorMeta, noise: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(meta.numel, dtype=meta.dtype, device=noise.device)
    for start in range(0, meta.numel, _NOISE):
        part = flat[start : start + _NOISE]
        part.copy_(noise[: part.numel()])
    return flat.reshape(meta.shape)
