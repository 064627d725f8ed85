"""What every server of this benchmark answers."""

from __future__ import annotations

import orjson

TOKENS = list(range(100, 116))
REPLY = orjson.dumps(
    {
        "text": "t" * len(TOKENS),
        "output_ids": TOKENS,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": len(TOKENS)},
            "prompt_tokens": 32,
            "completion_tokens": len(TOKENS),
            "cached_tokens": 0,
            "weight_version": "1",
        },
    }
)
