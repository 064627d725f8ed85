"""Log probabilities in OpenAI's two forms, and a prompt's in vLLM's. Pure, but for the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.v1.rollout_pb2 import TokenLogprob


def completion(entries: Sequence[TokenLogprob], texts: Tokenizer | None, at: int = 0) -> dict[str, Any]:
    """As /v1/completions has them: parallel lists. ``at``: characters of the tokens before them."""
    tokens = [_text(entry.token_id, texts) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_text(top.token_id, texts): top.logprob for top in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def chat(entries: Sequence[TokenLogprob], texts: Tokenizer | None) -> dict[str, Any]:
    """As /v1/chat/completions has them: one object a token."""
    content = [{**_token(entry, texts), "top_logprobs": [_token(top, texts) for top in entry.top]} for entry in entries]
    return {"content": content}


_WORST = -9999.0
"""vLLM's log probability of a token that cannot be."""


def of_prompt(entries: Sequence[TokenLogprob], tops: int) -> list[dict[str, Any] | None]:
    """As vLLM has a prompt's: for each token but the first an object by id, of it and the ``tops`` most likely."""
    told: list[dict[str, Any] | None] = []
    for entry in entries:
        ordered = ranked(entry, tops) if entry.HasField("logprob") else []
        position = {
            str(each.token_id): {"logprob": finite(each.logprob), "rank": rank, "decoded_token": None}
            for each, rank in ordered
        }
        told.append(position or None)
    return told


def ranked(entry: TokenLogprob, tops: int) -> list[tuple[TokenLogprob, int]]:
    """A token, then the most likely ones besides it, with their ranks. A token that is not among the listed ones has
    the rank after them: its own is not known, and clients sort by it.
    """
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
    others = [top for top in entry.top[:tops] if top.token_id != entry.token_id]
    return [(each, ranks.get(each.token_id, len(entry.top) + 1)) for each in (entry, *others)]


def finite(logprob: float) -> float:
    """A log probability as JSON can have it."""
    return _WORST if math.isnan(logprob) else max(logprob, _WORST)


def _token(entry: TokenLogprob, texts: Tokenizer | None) -> dict[str, Any]:
    text = _text(entry.token_id, texts)
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


def _text(token: int, texts: Tokenizer | None) -> str:
    """The token's text; as vLLM writes ids, where there is no tokenizer."""
    return texts.text(token) if texts is not None else f"token_id:{token}"
