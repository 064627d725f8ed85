"""How a module's tensors and those of its checkpoint correspond.

transformers 5 keeps the experts of a layer in one three-dimensional parameter, while checkpoints hold each expert's
matrices by themselves; some models rename on the way, too. Its own conversion mapping, which ``save_pretrained``
follows, says what becomes of what. It is run here over tensors without memory, once: what comes out of it as a view
says which part of which parameter a tensor of the checkpoint is. No model needs code of its own for that.
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
        source: the module's name of the tensor that it is a part of.
        shape: shape of the part.
        stride: how far apart, in elements, neighbours along each dimension are in the contiguous module's tensor.
        offset: where in it the part starts, in elements.
    """

    source: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, given the module's tensor: a view where that one is contiguous."""
        if self.shape == tuple(tensor.shape) and self.stride == torch.empty(self.shape, device="meta").stride():
            return tensor
        whole = tensor.contiguous()
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


WRAPPING = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names under which torch's wrappers keep a module inside of another: torch.compile, FSDP, activation checkpoints."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that a checkpoint is of: without wrappers of torch's, and of a module of the trainer's own that holds
    nothing but one of transformers', that one.

    Raises UNSUPPORTED for a module with adapters of PEFT's: its tensors are in no checkpoint under their names.
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
            f"{type(module).__name__} holds adapters of PEFT's, whose tensors are in no checkpoint",
            field="weights",
            next_step="Merge them (merge_and_unload) and give the model, or send them as an adapter.",
        )
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or isinstance(module, modeling.PreTrainedModel):
        return module
    inside = [part for part in module.modules() if isinstance(part, modeling.PreTrainedModel)]
    if not inside or {id(t) for _, t in _state(module)} != {id(t) for _, t in _state(inside[0])}:
        return module  # more than a wrapper: it has tensors of its own, or several models
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
    """Every tensor of a module's checkpoint, by the name that it has there.

    The names are those that ``save_pretrained`` writes; of a module that is not transformers' the module's own. Tied
    tensors stand under each of their names. Those of ``verbatim`` that are names of the module's tensors keep them:
    give the names of a checkpoint that exists. Shapes are those that the module's tensors have now.

    Raises UNSUPPORTED when the mapping computes a tensor instead of cutting it out of one.
    """
    state = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in _state(module)}
    kept = {name: tensor for name, tensor in state.items() if name in verbatim}
    others = {name: tensor for name, tensor in state.items() if name not in verbatim}
    names = {id(tensor): name for name, tensor in state.items()}
    with _Views():
        found = _revert(module)(others)
    parts: dict[str, Part] = {}
    for name, tensor in (kept | found).items():
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
    """A module's tensors under the names of its checkpoint, as a :class:`~rlctl.weights.tensor.source.WeightSource`.

    Parameters come first, then the buffers that belong to the state; a DTensor is gathered when its turn comes, a
    parameter that holds all experts of a layer once for all of them. It may be kept: each pass gives what the module
    holds then.
    """

    stable = True

    def __init__(self, module: nn.Module, names: Collection[str] | None = None, *, spares: bool = False) -> None:
        """``names``: the tensors of the rollout checkpoint, where they are not what ``save_pretrained`` would write.

        They decide whether a tied tensor is given under one name or under all of them, and whether experts stay in one
        tensor. None: what is tied comes once, under its first name; with ``spares``, also under every other name that
        it could have in a checkpoint. Raises as :func:`unwrapped` and :func:`checkpoint_parts` do.
        """
        module = unwrapped(module)
        self._module = module
        self._spares: dict[str, Spare] = {}
        self._parts: dict[str, tuple[tuple[int, ...], dict[str, Part]]] = {}
        parts: dict[str, dict[str, Part]] = {}
        wanted = None if names is None else frozenset(names)
        for name, part in checkpoint_parts(module, wanted or frozenset()).items():
            if wanted is None or name in wanted:
                parts.setdefault(part.source, {})[name] = part
        seen: dict[int, str] = {}
        for source, tensor in _state(module):
            if source in parts and (names is not None or id(tensor) not in seen):
                self._parts[source] = (tuple(tensor.shape), parts[source])
                seen[id(tensor)] = source
            if spares and id(tensor) in seen:
                self._spare(seen[id(tensor)], source, tensor, tuple(parts[seen[id(tensor)]]), parts.get(source, {}))

    def _spare(
        self, first: str, source: str, tensor: torch.Tensor, usual: tuple[str, ...], parts: dict[str, Part]
    ) -> None:
        """Give the tensor, which comes as ``usual`` under its name ``first``, as ``source`` and as its parts too."""
        whole = Part(source, tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), 0)
        shape, known = self._parts[first]
        others = {name: part for name, part in ({source: whole} | parts).items() if name not in known}
        self._spares |= dict.fromkeys(others, Spare(usual))
        self._parts[first] = (shape, known | others)

    def spares(self) -> dict[str, Spare]:
        """Names that tensors could have in a checkpoint in place of, or beside, their usual ones; with these."""
        return dict(self._spares)

    def metas(self) -> list[TensorMeta]:
        """Every tensor's description. Raises FIELD_INVALID for a tensor without contents of its own."""
        metas: list[TensorMeta] = []
        for tensor, parts in self._held():
            for name, part in parts.items():
                refuse_unreadable(name, tensor)
                metas.append(TensorMeta(name, tensor.dtype, part.shape))
        return metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, in the order of :meth:`metas`; those that are whole here are not copied."""
        for tensor, parts in self._held():
            gather = getattr(tensor, "full_tensor", None)
            full = (tensor if gather is None else gather()).detach()
            for name, part in parts.items():
                yield name, part.of(full)

    def local(self) -> Iterator[Held]:
        """The values that this rank holds of the tensors, without gathering."""
        for tensor, parts in self._held():
            own = shard_of(tensor)
            if own is not tensor and len(parts) > 1:  # which of the parts its values are in is not known
                yield tuple(parts), own
                continue
            for name, part in parts.items():
                yield (name,), own if own is not tensor else part.of(tensor.detach())

    def _held(self) -> Iterator[tuple[torch.Tensor, dict[str, Part]]]:
        """What the module holds now: ``load_state_dict(assign=True)``, say, gives it other tensors for the old ones."""
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
    """Leaves views what they are: without memory there is nothing to be gained by making them contiguous."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _revert(module: nn.Module) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """From the module's names to the checkpoint's."""
    # A module can be transformers' only where transformers has been imported.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return dict
    loading = importlib.import_module("transformers.core_model_loading")
    return lambda state: loading.revert_weight_conversion(module, state)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers; tied ones under each of their names. Names say nothing of wrappers."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield _without_wrappers(name), parameter
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield _without_wrappers(name), buffer


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPING) if "_" in name else name
