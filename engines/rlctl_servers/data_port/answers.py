"""Answers of a server that are passed on, with rlctl's labels of versions in place of the server's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from rlctl_servers.updates.version_labels import Stamps

_EVENTS = "text/event-stream"
_JSON = "application/json"

_NAMED = re.compile(rb'"(weight_version|version|model|lora_path|id|root)":( ?)("(?:[^"\\]|\\.)*")')
"""A key and its text. Quotation marks inside a JSON text are escaped, so its content never matches."""


class Labels:
    """Names of versions, models and requests in an answer."""

    def __init__(self, stamps: Stamps, names: Mapping[str, str], *, strict: bool = True, versions: bool = True) -> None:
        """``names``: rlctl's names of models and ids, by the server's. ``strict``: every version must be rlctl's.

        ``versions``: the answer may name versions. False: what looks like a version is generated.
        """
        self._stamps = stamps
        self._strict = strict
        self._versions = versions
        self._since = stamps.present
        self._names = names

    def put_into(self, data: bytes) -> bytes:
        """Put rlctl's names into a piece of an answer. The piece must not end inside a text.

        Raises ENGINE_FAILED for a version that rlctl did not set, or that is earlier than at the beginning.
        """
        return _NAMED.sub(self._named, data)

    def _named(self, match: re.Match[bytes]) -> bytes:
        key, text = match[1].decode(), orjson.loads(match[3])
        name: Any
        if key not in ("weight_version", "version"):
            name = self._names.get(text, text)
        elif not self._versions:
            return match[0]
        elif self._stamps.version(text) is None and (not self._strict or (key == "version" and not Stamps.ours(text))):
            return match[0]  # unknown, or no version of weights
        else:
            name = self._stamps.version_since(text, self._since).label
        return match[0] if name == text else b'"%b":%b%b' % (match[1], match[2], orjson.dumps(name))


class Relabelling:
    """Puts rlctl's names into an answer. JSON and events are changed; other content stays.

    Attributes:
        whole: the answer is a JSON document, to be read whole.
    """

    def __init__(self, labels: Labels, content_type: str) -> None:
        self.whole = content_type == _JSON
        self._labels = labels
        self._events = content_type == _EVENTS
        self._line = b""

    def put_whole(self, body: bytes) -> bytes:
        """Return a whole body with rlctl's names. Raises as :meth:`Labels.put_into`."""
        return self._labels.put_into(body) if self.whole or self._events else body

    def put_into(self, piece: bytes) -> bytes:
        """Return what can be passed on after a piece: whole lines. After the last piece, b"", return the rest."""
        if not self._events:
            return piece
        lines, end, self._line = (self._line + piece).rpartition(b"\n")
        if not piece:
            lines, self._line = self._line, b""
        return self._labels.put_into(lines + end)
