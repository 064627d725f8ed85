"""HTTP requests to a route: bodies, paths, queries, headers and framing, as bytes."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.fuzz import values

DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000

BODIES = (
    *(b"", b" ", b"{", b"}", b"null", b"true", b"1", b'"x"', b"[]", b"{}", b"[{}]", b"\xff\xfe", b"\x00", b"nan"),
    *(b'{"a":1,}', b"{'a':1}", b'{"a":1}{"a":2}', b'\xef\xbb\xbf{"a":1}', '{"a":"é"}'.encode("utf-16"), b'{"a":NaN}'),
    *(b'{"a":' + b"9" * 5000 + b"}", b'{"a":1e99999}', b'{"a":"\xed\xa0\x80"}', b'{"a":"\\ud800"}', b"[" * 100_000),
    DEEP,
)
"""Bodies that are no JSON, or JSON that breaks parsers."""

ODD_HEADERS = (b"\xff", "é".encode(), b"a\tb", b"\xed\xa0\x80", b"x" * 3000, b"", b" ", b"-1", b"1e9", b"NaN", b"\x7f")
HEADERS = (
    *("Authorization", "Idempotency-Key", "X-Session-ID", "X-SMG-Routing-Key", "X-RLCTL-Min-Version", "X-RLCTL-Wait"),
    *("X-Forwarded-Proto", "X-Forwarded-For", "Accept", "Accept-Encoding", "Range", "If-None-Match", "Origin"),
    *("Cookie", "X-Request-Id", "traceparent", "X-RLCTL-Unknown", "Upgrade", "Connection", "Expect", "X-Api-Key"),
)
TYPES = (b"", b"text/plain", b"multipart/form-data", b"application/json; charset=x", b"\xff")
SEGMENTS = ("nobody", "%ff", "%00", "%2F", "..", "%2e%2e", "%ed%a0%80", "a" * 3000)
VALUES = ("1", "0.1", "true", "abort", "a", "-1", "nan", "%ff", "%00", "1e999")
LENGTHS = (b"-1", b"x", b"99999999999999999999", b"1, 2", b"+5", b"0x10")
ENCODINGS = (b"chunked", b"gzip, chunked", b"chunked, chunked", b"\x0bchunked", b"identity")
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "P\xc3", "")


@dataclass(frozen=True)
class Route:
    """A route of a server.

    Attributes:
        path: with placeholders, ``/engines/{slot}/x``.
        bodies: valid bodies of clients.
        query: names of the query.
    """

    method: str
    path: str
    bodies: Sequence[Mapping[str, Any]] = ()
    query: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """Bytes for one connection.

    Attributes:
        whole: one well-formed request, so that the connection can be used again.
        head: the method is HEAD.
    """

    data: bytes
    whole: bool
    head: bool = False


@dataclass(frozen=True)
class Fields:
    """Names of fields of bodies, with valid values by name."""

    names: Sequence[str]
    words: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    plain: Sequence[Any] = ()
    """Valid values of fields without an entry in ``words``."""


def drawn(chance: random.Random, route: Route, fields: Fields, headers: Mapping[str, str]) -> Request:
    """Return a request to a route: valid, or with faults of any layer. ``headers`` are sent unless replaced."""
    method = route.method if chance.random() < 0.97 else chance.choice(METHODS)
    body = _body(chance, route, fields) if route.method != "GET" or chance.random() < 0.1 else b""
    lines = {name: value.encode() for name, value in headers.items()}
    lines["Content-Type"] = b"application/json"
    if chance.random() < 0.1:
        lines["Content-Type"] = chance.choice(TYPES)
    if chance.random() < 0.1:
        lines[chance.choice(HEADERS)] = chance.choice(ODD_HEADERS)
    if chance.random() < 0.03:
        lines["Content-Encoding"] = encoding = chance.choice((b"gzip", b"deflate", b"br", b"zstd", b"x"))
        body = gzip.compress(body) if encoding == b"gzip" and chance.random() < 0.7 else body
    target = _target(chance, route)
    first = f"{method} {target} HTTP/1.1".encode("latin-1")
    if chance.random() < 0.08:
        return Request(_misframed(chance, first, lines, body), whole=False, head=method == "HEAD")
    lines["Content-Length"] = str(len(body)).encode()
    whole = method == route.method and target.startswith("/") and not {"Upgrade", "Connection", "Expect"} & lines.keys()
    whole = whole and not any(b"\x7f" in value for value in lines.values())
    if not whole:
        lines["Connection"] = b"close"
    return Request(_joined(first, lines, body), whole=whole, head=method == "HEAD")


def _joined(first: bytes, lines: Mapping[str, bytes], body: bytes) -> bytes:
    lines = {"Host": b"127.0.0.1", **lines}
    return b"\r\n".join([first, *(name.encode() + b": " + value for name, value in lines.items())]) + b"\r\n\r\n" + body


def _target(chance: random.Random, route: Route) -> str:
    def segment(_: re.Match[str]) -> str:
        if chance.random() < 0.6:
            return chance.choice(("a", "b"))
        return chance.choice(SEGMENTS) if chance.random() < 0.7 else quote(values.text(chance)[:500], safe="")

    path = re.sub(r"\{[^{}]*(\{[^{}]*\})?[^{}]*\}", segment, route.path)
    if chance.random() < 0.02:
        paths = (path + "/", "/" + path, path.upper(), path + "%00", "http://x" + path, path + "/../x", "*", "//")
        path = chance.choice(paths)
    if chance.random() < (0.4 if route.query else 0.05):
        names = [*route.query, "x", "%ff"]
        parts = [f"{chance.choice(names)}={_query_value(chance)}" for _ in range(chance.choice((1, 1, 1, 2, 2, 12)))]
        path += "?" + "&".join(parts)
    return path


def _query_value(chance: random.Random) -> str:
    return chance.choice(VALUES) if chance.random() < 0.8 else quote(values.text(chance)[:300], safe="")


def _body(chance: random.Random, route: Route, fields: Fields) -> bytes:
    kind = chance.random()
    if kind < 0.08:
        return chance.choice(BODIES[:-2]) if chance.random() < 0.98 else chance.choice(BODIES[-2:])
    document = dict(chance.choice(route.bodies)) if route.bodies and chance.random() < 0.7 else {}
    odd = chance.choice((0.0, 0.1, 0.3, 1.0))
    names = [*document] * 2 + [*fields.names]
    for _ in range(chance.choice((0, 1, 2, 4, 8, 30))):
        _change(chance, document, chance.choice(names), fields, odd)
    text = json.dumps(document)
    if kind < 0.12 and document:
        name = chance.choice([*document])
        text = "{" + f"{json.dumps(name)}: {json.dumps(values.json_value(chance))}, " + text[1:]  # the name twice
    body = text.encode()
    if kind > 0.93 and body:
        for _ in range(chance.choice((1, 1, 3))):
            place = chance.randrange(len(body))
            changed = body[:place] + chance.randbytes(1) + body[place + 1 :]
            body = chance.choice((body[:place], changed, body + body[place:]))
            if not body:
                break
    return body


def _change(chance: random.Random, document: dict[str, Any], name: str, fields: Fields, odd: float) -> None:
    if name in document and chance.random() < 0.2:
        del document[name]
    elif isinstance(document.get(name), dict) and chance.random() < 0.7:
        inner = dict(document[name])
        for key in list(inner) or ["x"]:
            if chance.random() < 0.3:
                inner[key] = _value(chance, key, fields, max(odd, 0.3))
        document[name] = inner
    else:
        document[name] = _value(chance, name, fields, odd)


def _value(chance: random.Random, name: str, fields: Fields, odd: float) -> Any:
    if chance.random() >= odd:
        return chance.choice(fields.words.get(name) or fields.plain)
    return values.json_value(chance)


def _misframed(chance: random.Random, first: bytes, lines: dict[str, bytes], body: bytes) -> bytes:
    """Return a request whose length, chunks or lines are wrong."""
    body = body[:2000]
    kind = chance.randrange(8)
    if kind == 0:
        lines["Content-Length"] = chance.choice((*LENGTHS, str(len(body) + 7).encode()))
    elif kind == 1:
        lines["Transfer-Encoding"] = chance.choice(ENCODINGS)
        size = chance.choice((b"%x" % len(body), b"ZZ", b"-1", b"f" * 17, b"%x;x=y" % len(body), b""))
        body = (
            size + b"\r\n" + body + chance.choice((b"\r\n0\r\n\r\n", b"\r\n", b"0\r\n\r\n", b"\r\n0\r\nX: y\r\n\r\n"))
        )
    elif kind == 2:
        lines["Transfer-Encoding"], lines["Content-Length"] = b"chunked", str(len(body)).encode()
    elif kind == 3:
        lines["Content-Length"] = str(max(len(body) - 3, 0)).encode()  # the rest is a second request
    elif kind == 4:
        other = (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0", first.replace(b" ", b"\t"))
        first = chance.choice((first[:-1] + b"9", first[:-8], first + b" x", *other))
    elif kind == 5:
        data = bytearray(_joined(first, {**lines, "Content-Length": str(len(body)).encode()}, body))
        for _ in range(chance.choice((1, 3, 10))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data)
    elif kind == 6:
        lines[chance.choice(("X\x00", "X Y", "", "é", ":", "X" * 9000))] = b"1"
        lines["Content-Length"] = str(len(body)).encode()
    else:
        return chance.randbytes(chance.choice((1, 20, 300)))
    return _joined(first, {**lines, "Connection": b"close"}, body)
