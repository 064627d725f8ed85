"""Computations of the checker beside the KV cache, for which a rank may lack memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from rlctl_torch.generation.forward_pass import run
from rlctl_torch.model.kv_cache import KVCache
from rlctl_torch.rank import Rank
from rlctl_torch.steps.step_plan import Batch

T = TypeVar("T")


def log_probabilities(rank: Rank, cache: KVCache, batch: Batch) -> torch.Tensor:
    """Compute a batch with a cache of its own. Return log probabilities ``[outputs, vocabulary]``, float32."""
    return torch.log_softmax(run(rank.model, cache, rank.adapters, batch, all_logits=True).float(), dim=-1)


def within_memory(rank: Rank, largest: Callable[[], object], compute: Callable[[], T]) -> T:
    """Compute, all ranks together. Raises MEMORY_FULL at every rank if a rank lacks memory, and the engine goes on.

    A rank that stops in the middle of a pass leaves the other ranks in a collective. So several ranks first compute the
    ``largest`` pass without collectives, and agree. Torch keeps the memory of this pass for the others.
    """
    if rank.ranks.size == 1:
        results: list[T] = []
        rank.ranks.agree(lambda: results.append(compute()))
        return results[0]
    with rank.ranks.alone():
        rank.ranks.agree(largest)
    return compute()
