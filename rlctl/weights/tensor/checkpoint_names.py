"""Correspondence of a module's tensors and the tensors of its checkpoint.

transformers 5 keeps the experts of a layer in one three-dimensional parameter. Checkpoints hold the matrices of each
expert separately, and some models also rename tensors. ``save_pretrained`` follows a conversion mapping of
transformers. This module runs the mapping once over tensors without memory. The result has a view of a parameter for
each tensor of the checkpoint, and the view shows the part of the parameter. No model needs code of its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.finite import Held, shard_of
from rlctl.weights.tensor.tensors import TensorMeta, refuse_unreadable
from rlctl.weights.tensor.tied_names import Spare


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint as a part of a module's tensor.

    Attributes:
        source: name of the whole tensor in the module.
        shape: shape of the part.
        stride: strides of the part in the module's contiguous tensor, in elements.
        offset: start of the part in the module's tensor, in elements.
    """

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the module's tensor: a view if the tensor is contiguous."""
        if self.shape == tuple(tensor.shape) and self.stride == torch.empty(self.shape, device="meta").stride():
            return tensor
        contiguous = tensor.contiguous()
        return contiguous.as_strided(self.shape, self.stride, contiguous.storage_offset() + self.offset)


WRAPPING = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which torch's wrappers hold an inner module: torch.compile, FSDP, activation checkpointing."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module without wrappers: torch's, or a trainer's module with nothing but one transformers model.

    Raises UNSUPPORTED for a module with PEFT adapters, because no checkpoint has tensors under its names. Raises
    UNSUPPORTED for a module with FullyShardedDataParallel, because of its flattened parameters.
    """
    _refuse_flat(module)
    while True:
        inner = next((part for name, part in module.named_children() if name in WRAPPING), None)
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if inner is None:
            break
        module = inner
    if getattr(module, "peft_config", None):
        raise Reason.UNSUPPORTED.error(
            f"{type(module).__name__} has PEFT adapters, whose tensors are in no checkpoint",
            field="weights",
            next_step="Merge the adapters (merge_and_unload) and pass the model, or send the tensors as an adapter.",
        )
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or isinstance(module, modeling.PreTrainedModel):
        return module
    inside = [part for part in module.modules() if isinstance(part, modeling.PreTrainedModel)]
    if not inside or {id(t) for _, t in _state(module)} != {id(t) for _, t in _state(inside[0])}:
        return module  # not only a wrapper: the module has tensors of its own, or several models
    return unwrapped(inside[0])


def _refuse_flat(module: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules()):
        raise Reason.UNSUPPORTED.error(
            f"{type(module).__name__} is sharded by FullyShardedDataParallel, which flattens its parameters",
            field="weights",
            next_step="Shard it by fully_shard, or give the pairs of its full state_dict.",
        )


def checkpoint_parts(module: nn.Module, verbatim: Set[str] = frozenset()) -> dict[str, Part]:
    """Return every tensor of a module's checkpoint by its checkpoint name.

    The names are those of ``save_pretrained``, or the module's own if the module is not a transformers model. Tied
    tensors appear under each name. ``verbatim`` has the names of an existing checkpoint; a name of the module in
    ``verbatim`` is kept. Shapes are the present shapes of the module's tensors.

    Raises UNSUPPORTED if the mapping computes a tensor instead of cutting it out of a parameter.
    """
    state = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in _state(module)}
    unmapped = {name: tensor for name, tensor in state.items() if name in verbatim}
    mapping_input = {name: tensor for name, tensor in state.items() if name not in verbatim}
    names = {id(tensor): name for name, tensor in state.items()}
    with _Views():
        mapped = _revert(module)(mapping_input)
    parts: dict[str, Part] = {}
    for name, tensor in (unmapped | mapped).items():
        source = names.get(id(tensor if tensor._base is None else tensor._base))
        if source is None:
            raise Reason.UNSUPPORTED.error(
                f"{name} is computed from several parameters of {type(module).__name__}, or changed on its way into "
                "the checkpoint",
                field="weights",
                next_step="Give pairs of checkpoint name and tensor instead of the module.",
            )
        parts[name] = Part(source, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return parts


class ModuleSource:
    """A module's tensors under their checkpoint names, as a :class:`~rlctl.weights.tensor.source.WeightSource`.

    Parameters come first, then the persistent buffers. A DTensor is gathered at its turn. A parameter with all experts
    of a layer is gathered once. The source is reusable: each pass yields the present tensors of the module.
    """

    stable = True

    def __init__(self, module: nn.Module, names: Collection[str] | None = None, *, spares: bool = False) -> None:
        """Create a source; ``names`` are the tensors of the rollout checkpoint, if not as in ``save_pretrained``.

        The names decide if a tied tensor is yielded under each name, and if experts stay in one tensor. With None a
        tied tensor is yielded once, under its first name. With ``spares`` also under every other possible checkpoint
        name. Raises as :func:`unwrapped` and :func:`checkpoint_parts`.
        """
        module = unwrapped(module)
        self._module = module
        self._spares: dict[str, Spare] = {}
        self._parts: dict[str, tuple[tuple[int, ...], dict[str, Part]]] = {}
        parts: dict[str, dict[str, Part]] = {}
        selected = None if names is None else frozenset(names)
        for name, part in checkpoint_parts(module, selected or frozenset()).items():
            if selected is None or name in selected:
                parts.setdefault(part.source, {})[name] = part
        first_sources: dict[int, str] = {}
        for source, tensor in _state(module):
            if source in parts and (names is not None or id(tensor) not in first_sources):
                self._parts[source] = (tuple(tensor.shape), parts[source])
                first_sources[id(tensor)] = source
            if spares and id(tensor) in first_sources:
                self._spare(
                    first_sources[id(tensor)],
                    source,
                    tensor,
                    tuple(parts[first_sources[id(tensor)]]),
                    parts.get(source, {}),
                )

    def _spare(
        self, first: str, source: str, tensor: torch.Tensor, usual: tuple[str, ...], parts: dict[str, Part]
    ) -> None:
        """Register the tensor also as ``source`` and its parts; ``usual`` are its names as the tensor ``first``."""
        whole = Part(source, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), 0)
        shape, existing = self._parts[first]
        added = {name: part for name, part in ({source: whole} | parts).items() if name not in existing}
        self._spares |= dict.fromkeys(added, Spare(usual))
        self._parts[first] = (shape, existing | added)

    def spares(self) -> dict[str, Spare]:
        """Return the other possible checkpoint names of tensors, each with the usual names."""
        return dict(self._spares)

    def metas(self) -> list[TensorMeta]:
        """Return all descriptions. Raises FIELD_INVALID for a tensor without contents or with a changed shape."""
        metas: list[TensorMeta] = []
        for tensor, parts in self._tensors():
            for name, part in parts.items():
                refuse_unreadable(name, tensor)
                metas.append(TensorMeta(name, tensor.dtype, part.shape))
        return metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors, in the order of :meth:`metas`. Contiguous tensors that are whole are not copied."""
        for tensor, parts in self._tensors():
            gather = getattr(tensor, "full_tensor", None)
            full = (tensor if gather is None else gather()).detach()
            for name, part in parts.items():
                yield name, part.of(full)

    def local(self) -> Iterator[Held]:
        """Yield the values at this rank, without gathering."""
        for tensor, parts in self._tensors():
            shard = shard_of(tensor)
            if shard is not tensor and len(parts) > 1:  # the values may be in any of the parts
                yield tuple(parts), shard
                continue
            for name, part in parts.items():
                yield (name,), shard if shard is not tensor else part.of(tensor.detach())

    def _tensors(self) -> Iterator[tuple[torch.Tensor, dict[str, Part]]]:
        """Yield the present tensors of the module. ``load_state_dict(assign=True)``, for example, replaces tensors."""
        for source, tensor in _state(self._module):
            shape, parts = self._parts.get(source, ((), {}))
            if parts and tuple(tensor.shape) != shape:
                raise Reason.FIELD_INVALID.error(
                    f"{source} has shape {tuple(tensor.shape)} by now, and had {shape}",
                    field="weights",
                    next_step="Make another source of the module.",
                )
            if parts:
                yield tensor, parts


class _Views(TorchFunctionMode):
    """Keeps views: a contiguous copy of a tensor without memory has no use."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _revert(module: nn.Module) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    # A module can be a transformers model only if transformers has been imported.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return dict
    loading = importlib.import_module("transformers.core_model_loading")
    return lambda state: loading.revert_weight_conversion(module, state)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then persistent buffers; tied tensors under each name. Names have no parts of wrappers."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _without_wrappers(name), parameter
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield _without_wrappers(name), buffer


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPING) if "_" in name else name
