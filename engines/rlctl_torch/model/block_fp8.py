"""Block-fp8 weights: held as codes and scales like in the checkpoint, dequantised for computation.

A parameter keeps the codes, and a buffer the scales, so that digests cover the bytes of the checkpoint. Reading such a
parameter as an attribute of its module dequantises the weight for that use. So no second copy can be older than the
digested weights, and no more than a single weight (of experts: a single expert) is dequantised at a time. Every rank
has all scales (a 4096th of the weights), so that a cut may fall inside a block.

Activations are not quantised. The results are the results of the dequantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.formats.block_fp8 import CODES, SCALE, BlockSize, dequantise, scales_of
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.tensor.checkpoint_names import Part
from rlctl.weights.tensor.tensors import TensorMeta


@dataclass(frozen=True)
class ScalePlace:
    """Place of the scales of a weight.

    Attributes:
        source: name of the module's buffer.
        index: position in the first dimension of the buffer; None: the whole buffer.
    """

    source: str
    index: int | None

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if self.index is None else buffer[self.index]


def expected_scales(checkpoint: Mapping[str, TensorMeta], block: BlockSize) -> dict[str, TensorMeta]:
    """Return the scales required by a checkpoint's codes, by name. Scales in the checkpoint keep their dtype."""
    expected: dict[str, TensorMeta] = {}
    for name, meta in checkpoint.items():
        if meta.dtype == CODES:
            scale = name + SCALE
            dtype = checkpoint[scale].dtype if scale in checkpoint else torch.float32
            expected[scale] = TensorMeta(scale, dtype, block.scales(meta.shape))
    return expected


def hold_codes(
    module: nn.Module, parts: Mapping[str, Part], checkpoint: Mapping[str, TensorMeta]
) -> dict[str, ScalePlace]:
    """Turn parameters with codes in the checkpoint into codes and scales, still on the meta device.

    ``parts`` are this rank's parts. Returns the places of the scales by checkpoint name. Raises UNSUPPORTED if the
    experts of a parameter are not all quantised alike.
    """
    scales = scales_of(checkpoint)
    names_by_parameter: dict[str, list[str]] = {}
    for name in checkpoint:
        if name in parts:
            names_by_parameter.setdefault(parts[name].source, []).append(name)
    places: dict[str, ScalePlace] = {}
    for parameter, names in names_by_parameter.items():
        quantised = [scales[name] for name in names if name in scales]
        if not quantised:
            continue
        shapes = {checkpoint[scale].shape for scale in quantised}
        dtypes = {checkpoint[scale].dtype for scale in quantised}
        if len(quantised) != len(names) or len(shapes) > 1 or len(dtypes) > 1:
            raise _unsupported(f"the experts of {parameter} are not all quantised alike")
        path, _, leaf = parameter.rpartition(".")
        owner, buffer = module.get_submodule(path), f"{parameter}{SCALE}"
        codes = torch.empty(owner._parameters[leaf].shape, dtype=CODES, device="meta")  # type: ignore[union-attr]
        owner._parameters[leaf] = nn.Parameter(codes, requires_grad=False)
        is_single = owner._parameters[leaf].dim() == 2  # type: ignore[union-attr]
        shape = shapes.pop() if is_single else (len(names), *shapes.pop())
        owner.register_buffer(f"{leaf}{SCALE}", torch.empty(shape, dtype=dtypes.pop(), device="meta"))
        places |= {scale: ScalePlace(buffer, None if is_single else at) for at, scale in enumerate(quantised)}
    return places


def compute_dequantised(
    module: nn.Module, parts: Mapping[str, Part], shards: ShardMap, block: BlockSize, dtype: torch.dtype
) -> None:
    """Let reads of parameters with codes return dequantised values in ``dtype``. Call after the load of the weights."""
    scales = scales_of(shards.reference)
    pieces_by_parameter: dict[str, list[tuple[Part, _Quantised]]] = {}
    for name, scale in scales.items():
        quantised = _Quantised(shards.shards[name], shards.shards[scale], block, dtype)
        pieces_by_parameter.setdefault(parts[name].source, []).append((parts[name], quantised))
    for parameter, pieces in pieces_by_parameter.items():
        path, _, leaf = parameter.rpartition(".")
        owner = module.get_submodule(path)
        codes = owner._parameters[leaf]
        assert codes is not None
        _read_as(owner, leaf, pieces[0][1].dequantise if codes.dim() == 2 else _Experts(codes, pieces).read)


class _Quantised:
    """A tensor of the checkpoint: this rank's codes, and all scales."""

    def __init__(self, codes: Shard, scale: Shard, block: BlockSize, dtype: torch.dtype) -> None:
        self._codes = codes
        self._scale = scale
        self._block = block
        self._dtype = dtype
        self._start = [0, 0]
        if codes.slice.dim is not None:
            self._start[codes.slice.dim] = codes.slice.start

    def dequantise(self) -> torch.Tensor:
        row, column = self._start
        # The memory may have been released and allocated again.
        codes, scale = self._codes.local, self._scale.local
        return dequantise(codes, scale, self._block, row=row, column=column).to(self._dtype)


class _Experts:
    """Stand-in for a parameter ``[experts, rows, columns]``. An index returns the dequantised weight of an expert."""

    def __init__(self, codes: torch.Tensor, pieces: list[tuple[Part, _Quantised]]) -> None:
        experts, _, columns = codes.shape
        at = sorted(pieces, key=lambda piece: piece[0].offset)
        if any(part.shape[1] != columns or part.stride != (columns, 1) for part, _ in at) or len(at) % experts:
            raise _unsupported("the experts' weights do not lie row below row")
        per_expert = len(at) // experts
        self._experts = [
            [quantised for _, quantised in at[n * per_expert : (n + 1) * per_expert]] for n in range(experts)
        ]

    def read(self) -> _Experts:
        return self

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return torch.cat([quantised.dequantise() for quantised in self._experts[int(expert)]])


def _read_as(owner: nn.Module, name: str, read: Callable[[], Any]) -> None:
    """Make ``owner.name`` the result of ``read``. The parameter itself stays in the module's ``_parameters``."""
    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {name: property(lambda _: read())})


def _unsupported(why: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(f"the torch engine cannot serve this model: {why}", field="model_path")
