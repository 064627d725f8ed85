"""Attention of a packed batch over the KV cache, plugged into transformers' AttentionInterface.

Every forward pass is one sequence dimension of all tokens of all sequences, ``[1, tokens]``; no padding reaches the
linear layers. Inside attention the tokens are grouped by sequences of like length and padded within their group. The
function finds the batch in a thread-local, not in its arguments: not every model hands unknown keyword arguments down
to its attention layers. (No mask function is registered for it: transformers then makes no mask, which is what is
wanted.) Which tokens a layer sees is found out once, beforehand, from the mask that it is given then: not every model
whose layers see a window only says so to the attention function.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from rlctl.contract.errors import Reason, RlctlError
from rlctl_torch.model.kv_cache import PADDING_SLOT, KVCache, LayerShape
from rlctl_torch.steps.step_plan import Batch

IMPLEMENTATION = "rlctl_kv_slots"
"""Name that the attention function is registered under."""

_RECORDING = "rlctl_kv_slots_recording"
"""The same for finding out what the layers ask for."""

_FAR = 1024
"""Tokens back to which a layer without a window is seen to look."""

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


class _Recorded:
    """What the layers have asked for: their shapes, and the windows of the masks that they are given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: list[tuple[torch.Tensor, int | None]] = []

    def window(self, layer: torch.nn.Module, mask: torch.Tensor | None, said: int | None) -> int | None:
        """How many tokens a layer sees that is given this mask; without one, so many as it says."""
        if mask is None:
            return said
        for known, window in self.windows:
            if known is mask:
                return window
        raise _unsupported(layer, "a mask of its own kind")


class _Current(threading.local):
    batch: AttentionBatch | None = None
    recorded: _Recorded | None = None


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
def recording(config: Any) -> Iterator[dict[int, LayerShape]]:
    """While it lasts, this thread's forward passes of the model with this config attend to themselves only, and the
    layers' shapes are noted down. A layer that asks for what :func:`attend` does not compute raises UNSUPPORTED.
    """
    recorded = _current.recorded = _Recorded()
    config._attn_implementation = _RECORDING
    try:
        yield recorded.shapes
    finally:
        config._attn_implementation = IMPLEMENTATION
        _current.recorded = None


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Note down what a layer asks for; returns its attention to the tokens of this pass alone."""
    _refuse_unknown(module, is_causal, kwargs)
    recorded = _current.recorded
    assert recorded is not None, "a forward pass outside recording()"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in recorded.shapes:
        raise _unsupported(module, "keys and values of its own for every time that it is called in a pass")
    window = recorded.window(module, attention_mask, sliding_window)
    recorded.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
    alone = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return alone.transpose(1, 2), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """What transformers gives to layers that :func:`_record` notes down. There may be no layer that it is made for."""
    assert _current.recorded is not None, "a forward pass outside recording()"
    last = torch.tensor(2 * (local_size or _FAR) + 1, device=device)
    keys = torch.arange(int(last) + 2, device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    seen = (keys <= last) & (last - keys < (local_size or len(keys)))
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
    if torch.equal(mask_function(none, none, last, keys).expand(len(keys)), seen):
        _current.recorded.windows.append((mask, local_size))
    return mask


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the current batch, called by the model's layers; each sees what it saw when it was recorded.

    query: ``[1, heads, tokens, size]``; key, value: ``[1, kv heads, tokens, size]``. Returns
    ``[1, tokens, heads, value size]`` in the query's dtype, and no weights.
    """
    _refuse_unknown(module, is_causal, kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch = _current.batch
    assert batch is not None, "a forward pass outside attending()"
    window = batch.cache.layers[layer].window
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
            attn_mask=group.mask(window),
            scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)
        if group.real is None:
            out[group.tokens] = attended
        else:
            out[group.tokens[group.real]] = attended[group.real]
    return out[None], None


def _refuse_unknown(module: torch.nn.Module, is_causal: bool | None, given: Mapping[str, Any]) -> None:
    unknown = [name for name in _UNSUPPORTED if given.get(name) is not None]
    if unknown or is_causal is False:
        raise _unsupported(module, ", ".join(unknown) or "is_causal=False")


def _unsupported(module: torch.nn.Module, what: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(
        f"{type(module).__name__} wants attention with {what}, which the torch engine does not compute"
    )


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionInterface.register(_RECORDING, _record)
AttentionMaskInterface.register(_RECORDING, _mask)
