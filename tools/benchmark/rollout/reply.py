"""The answer of every server of this benchmark: whole, and as a stream with a token in every event."""

from __future__ import annotations

import orjson

TOKENS = list(range(100, 116))


def _reply(tokens: int) -> bytes:
    """Return SGLang's answer, or the event of its stream, with ``tokens`` tokens."""
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": tokens} if tokens == len(TOKENS) else None,
        "prompt_tokens": 32,
        "completion_tokens": tokens,
        "cached_tokens": 0,
        "weight_version": "1",
    }
    return orjson.dumps({"text": "t" * tokens, "output_ids": TOKENS[:tokens], "meta_info": meta})


REPLY = _reply(len(TOKENS))
EVENTS = [b"data: %b\n\n" % _reply(count) for count in range(1, len(TOKENS) + 1)] + [b"data: [DONE]\n\n"]
