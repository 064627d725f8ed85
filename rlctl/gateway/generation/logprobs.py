"""Log probabilities in OpenAI's two forms. Pure, but for the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.gateway.generation.tokenizers import Tokenizer
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


def _token(entry: TokenLogprob, texts: Tokenizer | None) -> dict[str, Any]:
    text = _text(entry.token_id, texts)
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


def _text(token: int, texts: Tokenizer | None) -> str:
    """The token's text; as vLLM writes ids, where there is no tokenizer."""
    return texts.text(token) if texts is not None else f"token_id:{token}"
