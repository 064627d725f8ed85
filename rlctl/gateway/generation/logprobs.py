"""Log probabilities in OpenAI's two forms, and of prompts in vLLM's form. Pure, except for the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.v1.rollout_pb2 import TokenLogprob


def completion(entries: Sequence[TokenLogprob], texts: Tokenizer | None, at: int = 0) -> dict[str, Any]:
    """Return the parallel lists of /v1/completions. ``at``: number of characters before the tokens."""
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
    """Return one object for each token, in the form of /v1/chat/completions."""
    content = [{**_token(entry, texts), "top_logprobs": [_token(top, texts) for top in entry.top]} for entry in entries]
    return {"content": content}


_WORST = -9999.0
"""vLLM's log probability of an impossible token."""


def of_prompt(entries: Sequence[TokenLogprob], tops: int) -> list[dict[str, Any] | None]:
    """Return a prompt's log probabilities in vLLM's form.

    Each token except the first has an object, by token id, of the token and the ``tops`` most likely tokens.
    """
    positions: list[dict[str, Any] | None] = []
    for entry in entries:
        ordered = ranked(entry, tops) if entry.HasField("logprob") else []
        position = {
            str(each.token_id): {"logprob": finite(each.logprob), "rank": rank, "decoded_token": None}
            for each, rank in ordered
        }
        positions.append(position or None)
    return positions


def ranked(entry: TokenLogprob, tops: int) -> list[tuple[TokenLogprob, int]]:
    """Return a token and the other most likely tokens, with ranks.

    A token outside the listed tokens gets the next rank: its true rank is unknown, and clients sort by rank.
    """
    ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
    other_tops = [top for top in entry.top[:tops] if top.token_id != entry.token_id]
    return [(each, ranks.get(each.token_id, len(entry.top) + 1)) for each in (entry, *other_tops)]


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent."""
    return _WORST if math.isnan(logprob) else max(logprob, _WORST)


def _token(entry: TokenLogprob, texts: Tokenizer | None) -> dict[str, Any]:
    text = _text(entry.token_id, texts)
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


def _text(token: int, texts: Tokenizer | None) -> str:
    """Return the token's text, or its id in vLLM's form without a tokenizer."""
    return texts.text(token) if texts is not None else f"token_id:{token}"
