"""Answers of a server that are passed on, with rlctl's labels of versions in place of the server's."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson

from rlctl.engine import HttpHead
from rlctl_servers.updates.version_labels import Stamps

_EVENTS = "text/event-stream"
_JSON = "application/json"

_NAMED = re.compile(rb'"(weight_version|version|model|lora_path|id|root)":( ?)("(?:[^"\\]|\\.)*")')
"""A key and its text. Quotation marks inside a JSON text are escaped, so its content never matches."""


class Labels:
    """Names of versions, models and requests in an answer."""

    def __init__(self, stamps: Stamps, names: Mapping[str, str], *, strict: bool = True) -> None:
        """``names``: rlctl's names of models and ids, by the server's. ``strict``: every version must be rlctl's."""
        self._stamps = stamps
        self._strict = strict
        self._since = stamps.present
        self._names = names

    def put_into(self, data: bytes) -> bytes:
        """Put rlctl's names into a piece of an answer. The piece must not end inside a text.

        Raises ENGINE_FAILED for a version that rlctl did not set, or that is earlier than at the beginning.
        """
        return _NAMED.sub(self._named, data)

    def _named(self, found: re.Match[bytes]) -> bytes:
        key, text = found[1].decode(), orjson.loads(found[3])
        name: Any
        if key not in ("weight_version", "version"):
            name = self._names.get(text, text)
        elif self._stamps.version(text) is None and (not self._strict or (key == "version" and not Stamps.ours(text))):
            return found[0]  # unknown, or no version of weights
        else:
            name = self._stamps.version_since(text, self._since).label
        return found[0] if name == text else b'"%b":%b%b' % (found[1], found[2], orjson.dumps(name))


async def relabelled(
    parts: AsyncGenerator[HttpHead | bytes, None], labels: Labels
) -> AsyncGenerator[HttpHead | bytes, None]:
    """Yield an answer with rlctl's labels: events as they come, a JSON document whole, other content unchanged.

    Raises as :meth:`Labels.put_into`, and as ``parts``.
    """
    head = await anext(parts)
    assert isinstance(head, HttpHead)
    kind = next((value for name, value in head.headers if name.lower() == "content-type"), "").partition(";")[0]
    if kind == _JSON:
        body = labels.put_into(b"".join([part async for part in parts if isinstance(part, bytes)]))
        headers = [(name, value) for name, value in head.headers if name.lower() != "content-length"]
        yield HttpHead(head.status, [*headers, ("Content-Length", str(len(body)))])
        yield body
        return
    yield head
    remainder = b""
    async for part in parts:
        assert isinstance(part, bytes)
        if kind != _EVENTS:
            yield part
            continue
        lines, end, remainder = (remainder + part).rpartition(b"\n")
        if end:
            yield labels.put_into(lines + end)
    if remainder:
        yield labels.put_into(remainder)
