"""Sampling: from logits to tokens and log probabilities, a whole batch at a time.

A draw depends only on the distribution and on a number derived from (seed, sample, position). The draw is the inverse
of the cumulative distribution, in the order of token ids, at that number. The rest of the batch has no influence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlctl_torch.generation.request_settings import Settings


class Drawn(Protocol):
    """Properties of a sequence that sampling needs."""

    @property
    def settings(self) -> Settings: ...

    @property
    def seed(self) -> int: ...

    @property
    def index(self) -> int:
        """Number of the sample within its request."""

    @property
    def position(self) -> int:
        """Number of output tokens so far."""

    def seen(self) -> tuple[Mapping[int, int], frozenset[int]]:
        """Return the output tokens with their counts, and the prompt's tokens."""


@dataclass(frozen=True)
class Choice:
    """One sampled token.

    Attributes:
        logprob: log probability of the token, if requested.
        top: the most likely tokens with their log probabilities, if requested.
    """

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = field(default_factory=tuple)


def uniform(seed: int, sample: int, position: int) -> float:
    """Return a number in [0, 1) that depends on the three arguments only."""
    digest = hashlib.blake2b(f"{seed}/{sample}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Sequence[Drawn]) -> list[Choice]:
    """Draw a token for each sequence.

    logits: ``[sequences, vocabulary]``, any float dtype; may be overwritten.
    """
    logits = logits.float()
    settings = [sequence.settings for sequence in sequences]
    _penalise(logits, sequences)
    temperatures = [s.temperature or 1.0 for s in settings]
    if any(t != 1 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    tokens = _choose(logits, settings, sequences).tolist()
    if not any(s.logprobs for s in settings):
        return [Choice(token) for token in tokens]
    return _logprobs(logits, tokens, [s.logprobs for s in settings], [s.top_logprobs for s in settings])


@torch.inference_mode()
def score(logits: torch.Tensor, tokens: Sequence[int], settings: Settings) -> list[Choice]:
    """Return the log probabilities of prompt tokens, a token per row of ``logits`` (``[tokens, vocabulary]``)."""
    logits = logits.float() / (settings.temperature or 1.0)
    return _logprobs(logits, tokens, [True] * len(tokens), [settings.top_logprobs] * len(tokens))


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[bool], top: Sequence[int]) -> list[Choice]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    max_top = max(top)
    if not max_top:
        return [Choice(t, value if w else None) for t, value, w in zip(tokens, chosen, wanted, strict=True)]
    values, ids = logprobs.topk(max_top, dim=-1)
    entries = [
        tuple(zip(i[:count], v[:count], strict=True))
        for i, v, count in zip(ids.tolist(), values.tolist(), top, strict=True)
    ]
    return [Choice(t, v if w else None, e) for t, v, w, e in zip(tokens, chosen, wanted, entries, strict=True)]


def _choose(logits: torch.Tensor, settings: Sequence[Settings], sequences: Sequence[Drawn]) -> torch.Tensor:
    best = logits.argmax(dim=-1)
    sampled_rows = [row for row, s in enumerate(settings) if not s.greedy]
    if not sampled_rows:
        return best
    probabilities = torch.softmax(logits if len(sampled_rows) == len(settings) else logits[sampled_rows], dim=-1)
    if any(settings[row].filtered for row in sampled_rows):
        probabilities = _filter(probabilities, [settings[row] for row in sampled_rows])
    numbers = [uniform(sequences[row].seed, sequences[row].index, sequences[row].position) for row in sampled_rows]
    cumulative = probabilities.double().cumsum(dim=-1)
    targets = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    # First token with a cumulative probability above the target. Its own probability is above zero.
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    best[torch.tensor(sampled_rows, device=logits.device)] = tokens
    return best


def _filter(probabilities: torch.Tensor, settings: Sequence[Settings]) -> torch.Tensor:
    """Zero the probabilities outside top_k, then top_p of the rest, then min_p. The most likely token always stays."""
    device = probabilities.device
    vocabulary = probabilities.shape[1]
    top_k = torch.tensor([s.top_k or vocabulary for s in settings], device=device)[:, None]
    top_p = torch.tensor([s.top_p for s in settings], device=device)[:, None]
    min_p = torch.tensor([s.min_p for s in settings], device=device)[:, None]
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocabulary, device=device)[None] >= top_k, 0)
    preceding = ordered.cumsum(dim=-1) - ordered
    keep = preceding < top_p * ordered.sum(dim=-1, keepdim=True)
    keep |= top_p >= 1
    keep &= ordered >= min_p * ordered[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probabilities).scatter_(1, ids, ordered.masked_fill(~keep, 0))


def _penalise(logits: torch.Tensor, sequences: Sequence[Drawn]) -> None:
    """Lower the logits of tokens seen before, in place: first by repetition, then by frequency and presence."""
    for row, sequence in enumerate(sequences):
        settings = sequence.settings
        if not settings.penalised:
            continue
        output, prompt = sequence.seen()
        if settings.repetition_penalty != 1:
            ids = torch.tensor(list(output.keys() | prompt), device=logits.device)
            values = logits[row, ids]
            factor = settings.repetition_penalty
            logits[row, ids] = torch.where(values > 0, values / factor, values * factor)
        if output and (settings.frequency_penalty or settings.presence_penalty):
            ids = torch.tensor(list(output), device=logits.device)
            counts = torch.tensor(list(output.values()), dtype=logits.dtype, device=logits.device)
            logits[row, ids] -= settings.frequency_penalty * counts + settings.presence_penalty
