"""Answers of servers, received in pieces of every size."""

from __future__ import annotations

import pytest

from rlctl.runtime.http_answers import LONGEST, Parser

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive, X-Of-Link\r\nX-Of-Link: 1\r\nX-Mine:  a b \r\n\r\n"
    b"5;ext=1\r\nhello\r\nA\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\n"
)


def fed(data: bytes, size: int, method: str = "POST") -> tuple[Parser, bytes]:
    parser, body = Parser(method), b""
    for start in range(0, len(data), size):
        body += b"".join(parser.feed(data[start : start + size]))
    return parser, body


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_chunked_answer_is_read_however_it_comes(size: int) -> None:
    parser, body = fed(CHUNKED, size)
    assert (parser.status, body, parser.ended, parser.keeps) == (200, b"hello0123456789", True, True)
    assert parser.headers == [("Content-Type", "Text/Event-Stream; charset=utf-8"), ("X-Mine", "a b")]
    assert (parser.content_type, parser.has_length) == ("text/event-stream", False)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n", True),
    ],
)
def test_an_answer_with_a_length_ends_at_its_length(head: bytes, size: int, *, keeps: bool) -> None:
    parser, body = fed(head + b"content-length: 4\r\n\r\nfour", size)
    assert (body, parser.ended, parser.has_length, parser.keeps) == (b"four", True, True, keeps)
    assert not parser.headers


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    parser, body = fed(b"HTTP/1.1 200 OK\r\n\r\nall of it", 4)
    assert (body, parser.ended, parser.keeps) == (b"all of it", False, False)
    assert parser.is_until_close


@pytest.mark.parametrize(
    "data", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[:-5], b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n1"]
)
def test_an_answer_that_breaks_off_has_no_end(data: bytes) -> None:
    parser, _ = fed(data, 1000)
    assert not parser.ended
    assert not parser.is_until_close


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
        ("POST", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ],
)
def test_an_answer_without_a_body_ends_with_its_head(method: str, head: bytes) -> None:
    parser, body = fed(head, 5, method)
    assert (body, parser.ended, parser.has_length) == (b"", True, True)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("rest", [b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"garbage"])
@pytest.mark.parametrize("link", [b"", b"Connection: close\r\n"])
def test_data_after_an_answer_end_its_connection_and_not_the_answer(link: bytes, rest: bytes, size: int) -> None:
    parser, body = fed(b"HTTP/1.1 200 OK\r\n" + link + b"Content-Length: 2\r\n\r\nok" + rest, size)
    assert (parser.status, body, parser.ended, parser.keeps) == (200, b"ok", True, False)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_body_after_a_head_without_one_ends_the_connection(size: int) -> None:
    parser, body = fed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", size, "HEAD")
    assert (body, parser.ended, parser.keeps) == (b"", True, False)


def test_a_head_says_nothing_of_an_interim_one() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nContent-Type: text/event-stream\r\nX-A: 1\r\n\r\n"
    parser, _ = fed(interim + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1000)
    assert (parser.content_type, parser.headers, parser.ended) == ("", [], True)


def test_a_body_may_be_long_and_its_trailers_may_not() -> None:
    parser = Parser("POST")
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(3 * LONGEST // 1000):
        assert parser.feed(b"3e8\r\n" + bytes(1000) + b"\r\n") == [bytes(1000)]
    parser.feed(b"0\r\nX-T: " + b"a" * (LONGEST - 100))
    with pytest.raises(ValueError, match="without a piece"):
        parser.feed(b"a" * 200)


@pytest.mark.parametrize(
    "data",
    [
        b"220 smtp ready\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: 1\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: 1\nX-B: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello!!\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * LONGEST,
    ],
)
def test_other_data_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        fed(data, len(data))
