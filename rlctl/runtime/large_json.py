"""Parser of one large JSON document in its own process: ``python -m rlctl.runtime.large_json < DOCUMENT``.

The result has a form that the parent reads fast. Prompts of token ids, with millions of values, are returned as
serialized :class:`TokenIds`. The number of other values is bounded, and so is the size of a prompt. A document of
64 MiB takes 2 GiB at most, for a list of empty objects; the memory ends with the process.
"""

from __future__ import annotations

import gc
import marshal
import sys
from typing import Any

import orjson

from rlctl.v1.rollout_pb2 import TokenIds

MOST_VALUES = 1 << 20
"""Most numbers, texts, objects and lists of a document, without the token ids of prompts."""

MOST_PROMPT_BYTES = 16 << 20
"""Largest prompt in a message: servers accept no larger message."""

_IDS = ("input_ids", "input_tokens", "prompt", "token_ids", "tokens")
_TEXTS = ("text", "prompt")

INVALID, TOO_LARGE, PARSED = range(3)


def answer(document: bytes) -> tuple[int, Any, str]:
    """Return the kind of the result, the value or the error's text, and the field of the error."""
    try:
        value = orjson.loads(document)
    except ValueError as error:
        return INVALID, str(error), "body"
    if isinstance(value, dict):
        for name in _IDS:
            if isinstance(value.get(name), list):
                value[name] = _packed(value[name])
        for name in {*_IDS, *_TEXTS} & value.keys():
            size = _largest(value[name])
            if size > MOST_PROMPT_BYTES:
                text = f"a prompt has {size} bytes; the maximum is {MOST_PROMPT_BYTES}"
                return TOO_LARGE, text, name
    if not _few(value):
        return TOO_LARGE, f"it has more than {MOST_VALUES} values beside its prompts of token ids", "body"
    return PARSED, value, ""


def unpacked(value: Any) -> Any:
    """Return a value from the process, with prompts of token ids as :class:`TokenIds`."""
    if isinstance(value, dict):
        for name in _IDS:
            ids = value.get(name)
            if isinstance(ids, bytes):
                value[name] = TokenIds.FromString(ids)
            elif isinstance(ids, list):
                value[name] = [TokenIds.FromString(each) if isinstance(each, bytes) else each for each in ids]
    return value


def _packed(prompts: list[Any]) -> Any:
    """Serialize one prompt of token ids, or a list of prompts; return other values unchanged."""
    if prompts and isinstance(prompts[0], list) and len(prompts) <= MOST_VALUES:
        return [_serialized(each) if isinstance(each, list) else each for each in prompts]
    return _serialized(prompts)


def _serialized(ids: list[Any]) -> Any:
    try:
        return TokenIds(ids=ids).SerializeToString() if ids else ids
    except (TypeError, ValueError):
        return ids


def _largest(prompts: Any) -> int:
    return max(map(_size, prompts if isinstance(prompts, list) else [prompts]), default=0)


def _size(prompt: Any) -> int:
    if isinstance(prompt, str) and not prompt.isascii():
        return len(prompt.encode(errors="surrogatepass"))
    return len(prompt) if isinstance(prompt, str | bytes) else 0


def _few(value: Any) -> bool:
    """Return True if a value holds at most :data:`MOST_VALUES` values."""
    pending, count = [value], 1
    while pending:
        each = pending.pop()
        if isinstance(each, dict | list):
            count += len(each)
            if count > MOST_VALUES:
                return False
            pending.extend(each.values() if isinstance(each, dict) else each)
    return True


def main() -> None:
    """Read the document from standard input, and write the result to standard output."""
    gc.disable()  # there are no cycles; a pass over millions of lists takes seconds
    sys.stdout.buffer.write(marshal.dumps(answer(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
