"""One forward pass over a batch, the same on every rank."""

from __future__ import annotations

import torch

from rlctl_torch.model.attention import AttentionBatch, attending
from rlctl_torch.model.kv_cache import KVCache
from rlctl_torch.model.lora import Adapters
from rlctl_torch.model.model import Model
from rlctl_torch.steps.step_plan import Batch


@torch.inference_mode()
def run(model: Model, cache: KVCache, adapters: Adapters, batch: Batch, *, all_logits: bool) -> torch.Tensor:
    """Compute a batch: write its KV entries and return logits.

    The logits are ``[outputs, vocabulary]`` in the weights' dtype. A follower's logits are not read. So without
    ``all_logits`` only the first row is computed, unless the ranks must compute all rows together.
    """
    device = cache.table.device
    tokens = torch.tensor(batch.tokens, device=device)
    lengths = torch.tensor(batch.lengths, device=device)
    first = torch.tensor(batch.starts, device=device) - (lengths.cumsum(0) - lengths)
    positions = torch.arange(len(batch.tokens), device=device) + torch.repeat_interleave(first, lengths)
    outputs = batch.outputs if all_logits or not model.whole_head else batch.outputs[:1]
    with attending(AttentionBatch(batch, positions, cache)), adapters.applying(batch):
        result = model.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(outputs, device=device),
        )
    logits: torch.Tensor = result.logits[0]
    return logits
