"""Attention of a packed batch over the KV cache, plugged into transformers' AttentionInterface.

Every forward pass is one sequence dimension of all tokens of all sequences, ``[1, tokens]``; no padding reaches the
linear layers. Inside attention the tokens are grouped by sequences of like length and padded within their group. The
function finds the batch in a thread-local, not in its arguments: not every model hands unknown keyword arguments down
to its attention layers. (No mask function is registered: transformers then makes no mask, which is what is wanted.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from rlctl.errors import Reason
from rlctl_torch.kv_cache import PADDING_SLOT, KVCache, LayerShape
from rlctl_torch.plan import Batch

IMPLEMENTATION = "rlctl_kv_slots"
"""Name that the attention function is registered under."""

_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "cache")
"""Keyword arguments that change what attention computes and that this function does not know."""


class Group:
    """Sequences that are attended together.

    Attributes:
        tokens: indices of its tokens in the packed batch, ``[sequences, q]`` padded with each one's last.
        real: which of those are not padding, or None when all are real.
        slots: KV slots, ``[sequences, kv]``, padded with :data:`PADDING_SLOT`.
        distance: query position minus key position, ``[sequences, 1, q, kv]``.
    """

    def __init__(self, batch: Batch, members: list[int], offsets: list[int], table: torch.Tensor) -> None:
        device = table.device
        starts = torch.tensor([batch.starts[m] for m in members], device=device)
        lengths = torch.tensor([batch.lengths[m] for m in members], device=device)
        first = torch.tensor([offsets[m] for m in members], device=device)
        rows = torch.tensor([batch.rows[m] for m in members], device=device)
        q = max(batch.lengths[m] for m in members)
        kv = max(batch.starts[m] + batch.lengths[m] for m in members)
        steps = torch.arange(q, device=device)
        padded = torch.minimum(steps[None], lengths[:, None] - 1)
        self.tokens = first[:, None] + padded
        self.real = None if all(batch.lengths[m] == q for m in members) else steps[None] < lengths[:, None]
        keys = torch.arange(kv, device=device)
        present = keys[None] < (starts + lengths)[:, None]
        self.slots = torch.where(present, table[rows, :kv], PADDING_SLOT)
        self.distance = ((starts[:, None] + padded)[:, :, None] - keys[None, None])[:, None]
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Which keys each query sees: the past, at most ``window`` tokens of it; made once per batch."""
        if window not in self._masks:
            mask = self.distance >= 0
            self._masks[window] = mask if window is None else mask & (self.distance < window)
        return self._masks[window]


class AttentionBatch:
    """What attention needs to know about the batch of one forward pass; also writes the slot table."""

    def __init__(self, batch: Batch, positions: torch.Tensor, cache: KVCache) -> None:
        self.cache = cache
        device = cache.table.device
        self.slots = torch.tensor(batch.slots, device=device)
        lengths = torch.tensor(batch.lengths, device=device)
        rows = torch.repeat_interleave(torch.tensor(batch.rows, device=device), lengths)
        cache.table[rows, positions] = self.slots
        offsets, total = [], 0
        by_length: dict[int, list[int]] = {}
        for member, length in enumerate(batch.lengths):
            offsets.append(total)
            total += length
            by_length.setdefault((length - 1).bit_length(), []).append(member)
        self.groups = [Group(batch, members, offsets, cache.table) for members in by_length.values()]


class _Current(threading.local):
    batch: AttentionBatch | None = None
    shapes: dict[int, LayerShape] | None = None


_current = _Current()


@contextlib.contextmanager
def attending(batch: AttentionBatch) -> Iterator[None]:
    """While it lasts, this thread's forward passes attend over the batch."""
    _current.batch = batch
    try:
        yield
    finally:
        _current.batch = None


@contextlib.contextmanager
def recording() -> Iterator[dict[int, LayerShape]]:
    """While it lasts, this thread's forward passes attend to themselves only, and the layers' shapes are noted down."""
    shapes: dict[int, LayerShape] = {}
    _current.shapes = shapes
    try:
        yield shapes
    finally:
        _current.shapes = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the current batch, called by the model's layers.

    query: ``[1, heads, tokens, size]``; key, value: ``[1, kv heads, tokens, size]``. Returns
    ``[1, tokens, heads, value size]`` in the query's dtype, and no weights.
    """
    unknown = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unknown or is_causal is False:
        raise Reason.UNSUPPORTED.error(
            f"{type(module).__name__} wants attention with {', '.join(unknown) or 'is_causal=False'}, "
            "which the torch engine does not compute"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if _current.shapes is not None:
        _current.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        alone = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return alone.transpose(1, 2), None
    batch = _current.batch
    assert batch is not None, "a forward pass outside attending()"
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys[batch.slots] = key[0].transpose(0, 1).to(keys.dtype)
    values[batch.slots] = value[0].transpose(0, 1).to(values.dtype)
    queries = query[0].transpose(0, 1)
    out = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
    for group in batch.groups:
        attended = scaled_dot_product_attention(
            queries[group.tokens].transpose(1, 2),
            keys[group.slots].transpose(1, 2).to(query.dtype),
            values[group.slots].transpose(1, 2).to(query.dtype),
            attn_mask=group.mask(sliding_window),
            scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)
        if group.real is None:
            out[group.tokens] = attended
        else:
            out[group.tokens[group.real]] = attended[group.real]
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
