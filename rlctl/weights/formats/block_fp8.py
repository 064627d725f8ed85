"""The wire form of block-fp8 checkpoints: float8 weights with a scale per block, as in DeepSeek-V3 and Qwen3-FP8.

``quantization_config`` is ``{"quant_method": "fp8", "weight_block_size": [128, 128]}``. A weight ``NAME`` of shape
``[rows, columns]`` is ``float8_e4m3fn``. Its scales ``NAME_scale_inv`` have shape
``[ceil(rows / 128), ceil(columns / 128)]``, in float32 (DeepSeek) or bfloat16 (Qwen). A block's codes times its scale
are the weight's values. Blocks at the lower and right edge are smaller if the shape is no multiple.

Formula: per block, ``scale = max(|w|) / 448`` and ``q = float8_e4m3fn(w / scale)``, where 448 is float8_e4m3fn's
largest value; ``w ≈ q * scale``. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.2,
and ``weight_dequant`` in ``inference/kernel.py`` of deepseek-ai/DeepSeek-V3. A block of zeros has scale 1. The scale is
rounded to the checkpoint's dtype before the division, so that both sides use the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.checkpoint.checkpoint import Checkpoint
from rlctl.weights.tensor.finite import Held, local_values
from rlctl.weights.tensor.source import Entry, WeightSource, as_offer, atomic_lists, left_out, only, spares_of
from rlctl.weights.tensor.tensors import TensorMeta, by_name

CODES = torch.float8_e4m3fn
"""Dtype of the weights."""

LARGEST = torch.finfo(CODES).max
"""448: the largest value of :data:`CODES`."""

SCALE = "_scale_inv"
"""Suffix of a scale's name after its weight's name."""

SCALE_DTYPES = (torch.float32, torch.bfloat16)
"""Possible dtypes of scales."""


@dataclass(frozen=True)
class BlockSize:
    """Shape of the blocks that share a scale."""

    rows: int = 128
    columns: int = 128

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight. Raises FIELD_INVALID unless the weight has two dimensions."""
        if len(shape) != 2:
            raise Reason.FIELD_INVALID.error(f"blocks are of matrices, not of shape {shape}")
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def spread(self, scale: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Return the scale of every element of a part of a weight: float32, ``[rows, columns]`` of the part.

        ``rows`` and ``columns`` locate the part in the full weight; the part need not start or end with a block.
        """
        row = torch.arange(rows.start, rows.stop, device=scale.device) // self.rows
        column = torch.arange(columns.start, columns.stop, device=scale.device) // self.columns
        return scale.detach().to(torch.float32).index_select(0, row).index_select(1, column)


def block_size_of(config: Mapping[str, Any]) -> BlockSize | None:
    """Return the block size in a checkpoint's ``config.json``; None for a checkpoint that is not quantised.

    Raises UNSUPPORTED for another kind of quantisation.
    """
    settings = config.get("quantization_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise _unsupported(f"quantization_config is {settings!r}")
    size = settings.get("weight_block_size")
    supported = {"quant_method": ("fp8",), "activation_scheme": ("dynamic", None), "fmt": ("e4m3", None)}
    supported |= {"scale_fmt": ("float", None), "expert_dtype": ("fp8", None)}
    for name, allowed in supported.items():
        if settings.get(name) not in allowed:
            raise _unsupported(f"{name} is {settings.get(name)!r}")
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise _unsupported(f"weight_block_size is {size!r}")
    return BlockSize(*size)


def quantise(
    weight: torch.Tensor, block: BlockSize | None = None, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix of any float dtype to codes and scales; see the module for the formula and the shapes.

    Raises FIELD_INVALID for a tensor that is no matrix, or has infinite or NaN values.
    """
    block = block or BlockSize()
    down, right = block.scales(tuple(weight.shape))
    rows, columns = weight.shape
    values = weight.detach().to(torch.float32)
    padded = nn.functional.pad(values, (0, right * block.columns - columns, 0, down * block.rows - rows))
    largest = padded.view(down, block.rows, right, block.columns).abs().amax(dim=(1, 3))
    if not bool(largest.isfinite().all()):
        raise Reason.FIELD_INVALID.error("the weight holds values that are not finite", field="weights")
    scale = (largest / LARGEST).to(scale_dtype)
    # Zeros, or values so small that their scale is rounded to zero.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    ratio = values / block.spread(scale, slice(0, rows), slice(0, columns))
    # A scale may have been rounded down, and not every version of torch saturates in this cast.
    return ratio.clamp_(-LARGEST, LARGEST).to(CODES), scale


def dequantise(
    codes: torch.Tensor, scale: torch.Tensor, block: BlockSize | None = None, *, row: int = 0, column: int = 0
) -> torch.Tensor:
    """Multiply ``codes`` with their scales, in float32.

    ``codes`` may be a part of the weight that starts at ``row`` and ``column``; ``scale`` is the full weight's.
    """
    block = block or BlockSize()
    rows, columns = slice(row, row + codes.shape[0]), slice(column, column + codes.shape[1])
    return codes.detach().to(torch.float32) * block.spread(scale, rows, columns)


def scales_of(metas: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Return the names of the block-quantised weights in a checkpoint, each with the name of its scales."""
    return {name: name + SCALE for name, meta in metas.items() if meta.dtype == CODES and name + SCALE in metas}


class BlockFp8:
    """A source that quantises the weights of an inner source to the form of a block-fp8 checkpoint.

    A weight with scales in the checkpoint yields codes and scales, adjacent and as an atomic list. All other tensors
    are unchanged, as are weights that the inner source yields as codes.
    """

    def __init__(
        self,
        weights: nn.Module | WeightSource | Iterable[Entry],
        reference: Checkpoint | Iterable[TensorMeta],
        block: BlockSize | None = None,
    ) -> None:
        """Create a source; ``reference`` is the checkpoint with which the engines were started, or its tensors.

        ``block``: size of the blocks; None: the size in the checkpoint's config, or else 128 by 128. Raises
        FIELD_INVALID if a weight or its scale does not fit the reference, UNSUPPORTED for another quantisation or
        another dtype of scales.
        """
        source = as_offer(weights)
        if isinstance(reference, Checkpoint):
            block = block or block_size_of(reference.config)
            reference = reference.metas.values()
        self._block = block or BlockSize()
        reference_metas = by_name(reference, field="reference")
        scales = scales_of(reference_metas)
        metas = by_name(source.metas(), field="weights")
        dropped = left_out(spares_of(source), reference_metas)
        metas = {name: meta for name, meta in metas.items() if name not in dropped}
        self._source = only(source, metas)
        self._scales = {
            name: reference_metas[scales[name]]
            for name, meta in metas.items()
            if name in scales and meta.dtype != CODES
        }
        for name, scale in self._scales.items():
            if metas[name].shape != reference_metas[name].shape or scale.shape != self._block.scales(metas[name].shape):
                raise Reason.FIELD_INVALID.error(
                    f"{name} of shape {metas[name].shape} has no scales of shape {scale.shape} for blocks of "
                    f"{self._block.rows} by {self._block.columns}; the reference has {reference_metas[name].shape}",
                    field="weights",
                )
            if scale.dtype not in SCALE_DTYPES:
                raise _unsupported(f"{scale.name} is {scale.dtype}")

    def metas(self) -> list[TensorMeta]:
        """Return every tensor's description, in its wire form."""
        metas: list[TensorMeta] = []
        for meta in self._source.metas():
            scale = self._scales.get(meta.name)
            metas += [meta] if scale is None else [TensorMeta(meta.name, CODES, meta.shape), scale]
        return metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, in the order of :meth:`metas`. Raises as :func:`quantise`, with the name of the weight."""
        for name, tensor in self._source.tensors():
            scale = self._scales.get(name)
            if scale is None:
                yield name, tensor
                continue
            try:
                codes, scales = quantise(tensor, self._block, scale.dtype)
            except RlctlError as error:
                error.message = f"{name}: {error.message}"
                raise
            yield name, codes
            yield scale.name, scales

    def local(self) -> Iterator[Held] | None:
        """Return the values before quantisation, if the inner source exposes them."""
        return local_values(self._source)

    def together(self) -> list[tuple[str, ...]]:
        """Return the atomic lists: every quantised weight with its scales, and the inner source's lists."""
        lists = atomic_lists(self._source)
        listed = {name for names in lists for name in names}
        lists += [(name,) for name in self._scales if name not in listed]
        return [tuple(part for name in names for part in self._with_scale(name)) for names in lists]

    def _with_scale(self, name: str) -> list[str]:
        return [name, self._scales[name].name] if name in self._scales else [name]


def _unsupported(why: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(
        f"a checkpoint that is quantised such that its {why} is not known; known is fp8 in blocks with scales",
        field="model_path",
    )
