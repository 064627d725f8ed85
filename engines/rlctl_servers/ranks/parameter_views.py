"""Parts of tensors that are views of parameters, made again over copies of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl_servers.ranks.element_layout import ParameterForm


@dataclass(frozen=True)
class _Place:
    """Elements of a parameter.

    Attributes:
        offset: distance of the first element from the parameter's first, in elements.
        shard: the part, in the parameter of the search.
    """

    parameter: str
    offset: int
    shard: Shard

    def of(self, parameter: torch.Tensor) -> Shard:
        """Return the part in a parameter of the same form."""
        local = self.shard.local
        view = parameter.as_strided(local.shape, local.stride(), parameter.storage_offset() + self.offset)
        return Shard(self.shard.meta, view, self.shard.slice)


class ParameterViews:
    """The elements of parameters that form the parts of a rank's tensors."""

    def __init__(self, parts: Mapping[str, Shard], parameters: Mapping[str, torch.Tensor]) -> None:
        """Raises UNSUPPORTED, with its name, for a part that is no view of a parameter."""
        by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in parameters.items():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self._places = {
            name: _find(name, part, by_storage.get(part.local.untyped_storage().data_ptr(), ()))
            for name, part in parts.items()
        }
        self._forms = {
            place.parameter: ParameterForm.of(parameters[place.parameter]) for place in self._places.values()
        }

    def written(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters that have a part of a tensor."""
        return {name: parameters[name] for name in self._forms if name in parameters}

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> ShardMap:
        """Return the parts in these parameters. Raises INTERNAL if a parameter is missing or has a different form."""
        for name, form in self._forms.items():
            present = ParameterForm.of(parameters[name]) if name in parameters else None
            if present != form:
                raise Reason.INTERNAL.error(f"the parameter {name} is now {present} instead of {form}")
        return ShardMap({name: place.of(parameters[place.parameter]) for name, place in self._places.items()})


def _find(name: str, part: Shard, parameters: list[tuple[str, torch.Tensor]] | tuple[()]) -> _Place:
    local = part.local
    for parameter, tensor in parameters:
        offset = int(local.storage_offset()) - int(tensor.storage_offset())
        inside = offset >= 0 and offset + _span(local) <= _span(tensor)
        if tensor.dtype == local.dtype and inside:
            return _Place(parameter, offset, part)
    raise Reason.UNSUPPORTED.error(f"{name} is not stored as it is computed with: it is packed or processed")


def _span(tensor: torch.Tensor) -> int:
    """Return the distance of the last element from the first, plus 1."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
