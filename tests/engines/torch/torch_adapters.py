"""LoRA adapters as PEFT writes them, made on the spot, and what their merged models say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch_stage import Stage

from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_ADAPTER,
    Adapter,
    CommitUpdateRequest,
    LoadAdapterRequest,
    PrepareUpdateRequest,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_tensors(base: str, targets: Sequence[str], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Random matrices for every layer of a checkpoint with these last words."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(Path(base) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets and ".experts." not in name:
            out, into = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, into, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    return tensors


def make_adapter(
    to: Path,
    base: str,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    change: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> str:
    """Save an adapter; returns its directory. ``change``: settings of its config that differ."""
    to.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        **(change or {}),
    }
    (to / "adapter_config.json").write_text(json.dumps(config))
    save_file(lora_tensors(base, targets, rank, seed) if tensors is None else tensors, to / "adapter_model.safetensors")
    return str(to)


def merge_adapter(to: Path, base: str, adapter: str) -> str:
    """Save the base with ``W + scale * B @ A``; returns its directory."""
    shutil.copytree(base, to)
    config = json.loads((Path(adapter) / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config["use_rslora"] else config["r"]
    lora, weights = load_file(Path(adapter) / "adapter_model.safetensors"), load_file(to / "model.safetensors")
    for name, a in lora.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            delta = lora[name.replace(".lora_A.", ".lora_B.")].double() @ a.double()
            weights[weight] = (weights[weight].double() + config["lora_alpha"] / root * delta).float()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


async def load_adapter(stage: Stage, name: str, path: str, *, version: str = "one", update: str = "") -> None:
    """Carry the steps of a load from disk out."""
    update = update or f"adapter-{name}-{version}"
    prepare = PrepareUpdateRequest(kind=UPDATE_KIND_ADAPTER, adapter=Adapter(name=name, version=version, path=path))
    await stage(prepare, update=update)
    await stage(LoadAdapterRequest(name=name, path=path, version=version), update=update)
    await stage(CommitUpdateRequest(), update=update)
