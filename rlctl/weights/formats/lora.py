"""LoRA adapters in PEFT's format: their config, and the tensors that follow from the config.

An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``, or a config and tensors from a
trainer. The directory has no other safetensors file: SGLang would load that file too. An adapter adds ``scale * B @ A``
to the weights of some linear layers. Any other feature of PEFT is refused by name: outputs without the feature would
differ from the trained outputs.

Format: https://huggingface.co/docs/peft (checkpoint format).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import AdapterConfig
from rlctl.weights.checkpoint.checkpoint import SUFFIX, Checkpoint, open_files, read_config
from rlctl.weights.tensor.tensors import TensorMeta

CONFIG = "adapter_config.json"
STEM = "adapter_model"
TENSORS = STEM + SUFFIX

_PREFIX = "base_model.model."

_UNDERSTOOD = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "init_lora_weights"}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying", "megatron_core"),
}
"""Settings of training, or of features that other settings enable."""

_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base weights unchanged; all other initialisations train against a changed base."""


def from_peft(config: Mapping[str, Any], *, field: str, dtype: str = "") -> AdapterConfig:
    """Convert and check a PEFT config; ``dtype`` is the dtype of the tensors, such as "torch.float32".

    Raises FIELD_INVALID, with the setting, for invalid values; UNSUPPORTED for anything but plain LoRA.
    """
    kind = config.get("peft_type", "LORA")
    if getattr(kind, "value", kind) != "LORA":
        raise _unsupported(f"it is a {kind} adapter, not LORA", field)
    if config.get("bias", "none") not in ("none", None):
        raise _unsupported(f"bias is {config['bias']!r}; only 'none' is applied", field)
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise _unsupported(f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base", field)
    for name, value in config.items():
        if value and name not in _UNDERSTOOD | _WITHOUT_EFFECT:
            raise _unsupported(f"{name} is set, which is not applied", field)
    rank, alpha, modules = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if isinstance(modules, str):
        raise _unsupported(f"target_modules is the pattern {modules!r}; list the modules", field)
    if not isinstance(modules, Iterable) or not all(isinstance(module, str) for module in modules):
        raise _invalid("target_modules is no list of names", field)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank < 2**32:
        raise _invalid(f"r is {rank!r}; it must be a whole number above 0", field)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise _invalid(f"lora_alpha is {alpha!r}; it must be a number", field)
    try:
        result = AdapterConfig(
            lora_rank=rank,
            lora_alpha=float(alpha),
            target_modules=sorted(modules),
            rslora=bool(config.get("use_rslora")),
            dtype=dtype,
        )
    except (OverflowError, ValueError) as error:  # the number does not fit a float, or a name is not UTF-8
        raise _invalid(str(error), field) from error
    check(result, field=field)
    return result


def to_peft(config: AdapterConfig) -> dict[str, Any]:
    """Return the config as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": list(config.target_modules),
        "use_rslora": config.rslora,
        "bias": "none",
    }


def check(config: AdapterConfig, *, field: str) -> None:
    """Raise FIELD_INVALID for a config that no adapter can have."""
    if not config.lora_rank:
        raise _invalid("lora_rank is 0", f"{field}.lora_rank")
    if not math.isfinite(config.lora_alpha):
        raise _invalid(f"lora_alpha is {config.lora_alpha}", f"{field}.lora_alpha")
    if not config.target_modules or not all(config.target_modules):
        raise _invalid("target_modules names no module", f"{field}.target_modules")


def targets(config: AdapterConfig, modules: Iterable[str], *, field: str) -> list[str]:
    """Return the target modules of an adapter. A target is a module's full name, or the end of the name after a dot.

    ``modules`` are all modules of the model. Raises CHECKPOINT_MISMATCH, with the target, for an unknown target.
    """
    names = list(modules)
    selected: set[str] = set()
    for target in config.target_modules:
        matches = [name for name in names if name == target or name.endswith(f".{target}")]
        if not matches:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"the model has no linear layer {target!r}", field=field, next_step="Use an adapter of this model."
            )
        selected.update(matches)
    return sorted(selected)


def names_of(module: str) -> tuple[str, str]:
    """Return the names of a module's two matrices: (A, B)."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def metas_of(module: str, rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[TensorMeta, TensorMeta]:
    """Return the two matrices of a module of this size: A ``[rank, inputs]``, B ``[outputs, rank]``."""
    a, b = names_of(module)
    return TensorMeta(a, dtype, (rank, inputs)), TensorMeta(b, dtype, (outputs, rank))


def expected(
    config: AdapterConfig, layers: Mapping[str, tuple[int, int]], *, field: str
) -> dict[str, tuple[TensorMeta, TensorMeta]]:
    """Return the two matrices of every target module, in float32, by module.

    ``layers``: size of each linear layer that an adapter may target, as (outputs, inputs), by module. Raises as
    :func:`check` and :func:`targets`, and FIELD_INVALID for a rank larger than a layer.
    """
    check(config, field=field)
    matrices = {}
    for module in targets(config, layers, field=field):
        outputs, inputs = layers[module]
        if config.lora_rank > max(inputs, outputs):
            raise Reason.FIELD_INVALID.error(
                f"rank {config.lora_rank} is larger than layer {module}, {inputs} to {outputs}", field=field
            )
        matrices[module] = metas_of(module, config.lora_rank, inputs, outputs, torch.float32)
    return matrices


def open_adapter(path: str, *, field: str = "path") -> tuple[AdapterConfig, Checkpoint]:
    """Open an adapter's directory and check everything but its tensors' names; no tensor is read.

    Raises CHECKPOINT_NOT_FOUND (also if the adapter is replaced meanwhile), CHECKPOINT_MISMATCH (the directory holds
    further safetensors files), and as :func:`from_peft`.
    """
    settings = read_config(path, field=field, name=CONFIG)
    config = from_peft(settings, field=field)
    files = open_files(path, field=field, stem=STEM)
    stored = Checkpoint(path, {}, files, field=field, stem=STEM)
    try:
        if [file.path.name for file in files] != [TENSORS]:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{path}: an adapter is one file, {TENSORS}, not several", field=field
            )
        if read_config(path, field=field, name=CONFIG) != settings:
            raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} was changed while it was read", field=field)
    except RlctlError:
        stored.close()
        raise
    return config, stored


def _unsupported(cause: str, field: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(f"the adapter cannot be applied: {cause}", field=field)


def _invalid(cause: str, field: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(f"the adapter's config is wrong: {cause}", field=field)
