"""Answers of a server that are passed on, with rlctl's labels of versions in place of the server's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import orjson

from rlctl_servers.updates.version_labels import Stamps

_EVENTS = "text/event-stream"
_JSON = "application/json"

_Places: TypeAlias = Mapping[str, "_Places"]

_HERE: _Places = {}
_SPANS: _Places = {"version": _HERE}
_VERSIONS: _Places = {"weight_version": _HERE, "weight_versions": _SPANS}
_META: _Places = {"id": _HERE, **_VERSIONS}
_MESSAGE: _Places = {"id": _HERE, "model": _HERE}
_PLACES: _Places = {
    **dict.fromkeys(("model", "id", "root", "weight_version"), _HERE),
    **dict.fromkeys(("message", "response"), _MESSAGE),
    "meta_info": _META,
    "metadata": _VERSIONS,
    "choices": {"meta_info": _META, "weight_versions": _SPANS},
    "data": {"id": _HERE, "root": _HERE},
}
"""Keys under which servers write their own names, by the object that has the key. Every object, also the answer itself,
may be one of a list. Objects elsewhere may be generated, such as the input of a tool."""

_KEY = re.compile(
    rb'"(?=[cdimrvw])(?<!\\")(?:(weight_version|version|model|id|root)"\s*:\s*("(?:[^"\\]|\\.)*")'
    rb'|(meta_info|metadata|message|response|choices|data|weight_versions)"\s*:\s*([{\[]))'
)
"""A key and its text, or a key and the beginning of its object or list. Quotation marks inside a JSON text are escaped,
so its content never matches, nor the end of a longer key."""

_BRACKET = re.compile(rb"[{\[]")
_CURLY = bytes.maketrans(b"[]", b"{}")
_OTHER = bytes(set(range(256)) - set(b'[]{}"'))


class Labels:
    """Names of versions, models and requests in an answer."""

    def __init__(self, stamps: Stamps, names: Mapping[str, str], *, strict: bool = True) -> None:
        """``names``: rlctl's names of models and ids, by the server's. ``strict``: every version must be rlctl's."""
        self._stamps = stamps
        self._strict = strict
        self._since = stamps.present
        self._names = names

    def put_into(self, data: bytes) -> bytes:
        """Put rlctl's names into a JSON document, or into a line of events. All else stays byte for byte.

        Raises ENGINE_FAILED for a version that rlctl did not set, or that is earlier than at the beginning.
        """
        if not self._names and b'version"' not in data:
            return data
        parts, end = [], 0
        for key, start, stop in _own_names(data):
            text = orjson.loads(data[start:stop])
            name = self._named(key, text)
            if name != text:
                parts += [data[end:start], orjson.dumps(name)]
                end = stop
        return b"".join([*parts, data[end:]]) if parts else data

    def _named(self, key: str, text: str) -> str:
        if key not in ("weight_version", "version"):
            return self._names.get(text, text)
        if not self._strict and self._stamps.version(text) is None:
            return text
        label: str = self._stamps.version_since(text, self._since).label
        return label


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
        if self._events:
            return self._into_lines(body)
        return self._labels.put_into(body) if self.whole else body

    def put_into(self, piece: bytes) -> bytes:
        """Return what can be passed on after a piece: whole lines. After the last piece, b"", return the rest."""
        if not self._events:
            return piece
        lines, end, self._line = (self._line + piece).rpartition(b"\n")
        if not piece:
            lines, self._line = self._line, b""
        return self._into_lines(lines + end)

    def _into_lines(self, lines: bytes) -> bytes:
        return b"".join(map(self._labels.put_into, lines.splitlines(keepends=True)))


def _own_names(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield key, start and end of the texts at the places of a server's own names.

    A large answer is read by functions of ``bytes`` only: the keys are found first, and their depths from the brackets
    between them.
    """
    end = depth = 0
    inside: list[tuple[_Places, int, int]] = []  # by object or list of objects: its places, depths of its key and keys
    for match in _KEY.finditer(data):
        if not inside:
            first = _BRACKET.search(data)
            inside.append((_PLACES, 0, 2 if first is not None and first[0] == b"[" else 1))
        closed, opened = _levels(data[end : match.start()])
        end = match.end()
        while len(inside) > 1 and depth - closed <= inside[-1][1]:
            inside.pop()
        depth += opened - closed
        places, _, level = inside[-1]
        key = (match[1] or match[3]).decode()
        own = places.get(key) if depth == level else None
        if own is not None and match[1]:
            yield key, match.start(2), match.end(2)
        elif own:
            inside.append((own, depth, depth + (1 if match[4] == b"{" else 2)))
        if match[4]:
            depth += 1


def _levels(text: bytes) -> tuple[int, int]:
    """Return how many levels of a JSON document a part of it closes, and opens thereafter."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(_CURLY, _OTHER).replace(b'""', b"")
    if b'"' in text:  # some texts have brackets
        text = b"".join(text.split(b'"')[::2])
    while (rest := text.replace(b"{}", b"")) != text:
        text = rest
    closed = text.count(b"}")
    return closed, len(text) - closed
