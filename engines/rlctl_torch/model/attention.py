"""Attention of a packed batch over the KV cache, plugged into transformers' AttentionInterface.

A forward pass has a single sequence dimension for all tokens of all sequences, ``[1, tokens]``. No padding reaches the
linear layers. Inside attention the tokens are grouped by sequences of similar length and padded within their group. The
batch is in a thread-local, because some models do not pass unknown keyword arguments to their attention layers. No mask
function is registered, so transformers makes no mask. The window of each layer is determined once, beforehand, from the
mask that transformers gives to the layer. Some models with windows do not pass the window to the attention function.
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
"""Name of the registered attention function."""

_RECORDING = "rlctl_kv_slots_recording"
"""Name of the function that records the attention of the layers."""

_FAR = 1024
"""A layer without a window must see more than twice this number of tokens back."""

_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "cache")
"""Keyword arguments that change the attention and are not implemented here."""


class Group:
    """Sequences that are attended together.

    Attributes:
        tokens: indices of the tokens in the packed batch, ``[sequences, q]``, padded with each sequence's last token.
        real: mask of the tokens without padding, or None if there is no padding.
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
        """Return the mask of the keys for each query: the past, at most ``window`` tokens. Made once per batch."""
        if window not in self._masks:
            mask = self.distance >= 0
            self._masks[window] = mask if window is None else mask & (self.distance < window)
        return self._masks[window]


class AttentionBatch:
    """Slots and groups of a forward pass. The constructor also writes the slot table."""

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
    """Shapes that the layers have used, and the windows of their masks."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: list[tuple[torch.Tensor, int | None]] = []

    def window(self, layer: torch.nn.Module, mask: torch.Tensor | None, layer_window: int | None) -> int | None:
        """Return the number of tokens that a layer with this mask sees; without a mask, the layer's own number."""
        if mask is None:
            return layer_window
        for recorded_mask, window in self.windows:
            if recorded_mask is mask:
                return window
        raise _unsupported(layer, "a mask of its own kind")


class _Current(threading.local):
    batch: AttentionBatch | None = None
    recorded: _Recorded | None = None


_current = _Current()


@contextlib.contextmanager
def attending(batch: AttentionBatch) -> Iterator[None]:
    """Let this thread's forward passes attend over the batch inside the block."""
    _current.batch = batch
    try:
        yield
    finally:
        _current.batch = None


@contextlib.contextmanager
def recording(config: Any) -> Iterator[dict[int, LayerShape]]:
    """Record the layers' shapes in this thread's forward passes inside the block.

    The passes are of the model with this config, and attend to their own tokens only. A layer that needs more than
    :func:`attend` computes raises UNSUPPORTED.
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
    """Record the attention of a layer. Return its attention to the tokens of this pass alone."""
    _refuse_unknown(module, is_causal, kwargs)
    recorded = _current.recorded
    assert recorded is not None, "a forward pass outside recording()"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in recorded.shapes:
        raise _unsupported(module, "keys and values of its own for every time that it is called in a pass")
    window = recorded.window(module, attention_mask, sliding_window)
    recorded.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Make a mask for :func:`_record`, and note its window if the mask is a plain causal window. Some masks reach no
    layer.
    """
    assert _current.recorded is not None, "a forward pass outside recording()"
    last = torch.tensor(2 * (local_size or _FAR) + 1, device=device)
    keys = torch.arange(int(last) + 2, device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    visible = (keys <= last) & (last - keys < (local_size or len(keys)))
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
    if torch.equal(mask_function(none, none, last, keys).expand(len(keys)), visible):
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
    """Compute the attention of the current batch for a layer, with the window recorded for that layer.

    query: ``[1, heads, tokens, size]``; key, value: ``[1, kv heads, tokens, size]``. Returns
    ``[1, tokens, heads, value size]`` in the query's dtype, and no attention weights.
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
    output = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
    for group in batch.groups:
        group_output = scaled_dot_product_attention(
            queries[group.tokens].transpose(1, 2),
            keys[group.slots].transpose(1, 2).to(query.dtype),
            values[group.slots].transpose(1, 2).to(query.dtype),
            attn_mask=group.mask(window),
            scale=scaling,
            enable_gqa=True,
        ).transpose(1, 2)
        if group.real is None:
            output[group.tokens] = group_output
        else:
            output[group.tokens[group.real]] = group_output[group.real]
    return output[None], None


def _refuse_unknown(module: torch.nn.Module, is_causal: bool | None, arguments: Mapping[str, Any]) -> None:
    unknown = [name for name in _UNSUPPORTED if arguments.get(name) is not None]
    if unknown or is_causal is False:
        raise _unsupported(module, ", ".join(unknown) or "is_causal=False")


def _unsupported(module: torch.nn.Module, what: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(
        f"{type(module).__name__} needs attention with {what}, which the torch engine does not compute"
    )


AttentionInterface.register(IMPLEMENTATION, attend)
AttentionInterface.register(_RECORDING, _record)
AttentionMaskInterface.register(_RECORDING, _mask)
