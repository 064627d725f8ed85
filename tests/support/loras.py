"""LoRA adapters for the demo's model, and the output of the merged model."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlctl.demo.tiny import encode

TARGETS = ["q_proj", "v_proj", "down_proj"]
CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": TARGETS,
    "bias": "none",
}
SCALE = 2
"""lora_alpha over r of CONFIG."""


def lora(model: Any, seed: int, targets: Sequence[str] = TARGETS) -> dict[str, torch.Tensor]:
    """Return matrices for the layers of a model with these last names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            a = torch.randn(2, module.in_features, generator=generator)
            b = torch.randn(module.out_features, 2, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a * 0.2
            tensors[f"base_model.model.{name}.lora_B.weight"] = b * 0.2
    return tensors


def save(directory: Path, tensors: Mapping[str, torch.Tensor], **change: Any) -> str:
    """Save an adapter in PEFT's format; return its directory. ``change``: differing settings of its config."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **change}))
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    return str(directory)


def merged_says(model: Any, prompt: str, tensors: Mapping[str, torch.Tensor], count: int = 8) -> list[int]:
    """Return the greedy output of the merged model after a prompt."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                module.weight += SCALE * tensors[name.replace(".lora_A.", ".lora_B.")] @ a
        tokens = encode(prompt)
        start = len(tokens)
        for _ in range(count):
            tokens.append(int(merged(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[start:]
