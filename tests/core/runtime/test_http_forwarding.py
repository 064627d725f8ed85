"""Headers that a forwarded request keeps."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from rlctl.runtime.http_forwarding import end_to_end

OPTIONS = [
    [("Connection", "X-A, keep-alive, X-B")],
    [("Connection", "X-A"), ("connection", "X-B")],
    [("Connection", "close"), ("Connection", " x-b ,"), ("CONNECTION", "x-A")],
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("first", [False, True])
def test_the_names_of_every_connection_header_are_dropped(options: list[tuple[str, str]], *, first: bool) -> None:
    kept = [("X-A", "1"), ("X-B", "2"), ("X-C", "3")]
    headers = CIMultiDict([*options, *kept] if first else [*kept, *options])
    assert end_to_end(CIMultiDictProxy(headers)) == [("X-C", "3")]


def test_a_repeated_header_stays_repeated_in_its_order() -> None:
    pairs = [("X-A", "1"), ("X-B", "2"), ("x-a", "3"), ("X-A", "1")]
    headers = CIMultiDict([*pairs, ("TE", "trailers"), ("Trailer", "X-T"), ("Upgrade", "h2c"), ("Host", "x")])
    assert end_to_end(CIMultiDictProxy(headers), ("host",)) == pairs
