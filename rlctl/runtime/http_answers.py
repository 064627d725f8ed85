"""Parser of an HTTP/1.1 answer, by llhttp. Pure."""

from __future__ import annotations

import httptools

from rlctl.runtime.http_forwarding import HOP_BY_HOP

LONGEST = 64 << 10
"""Most bytes of a head, and of data between two pieces of a body."""


class Parser:
    """The answer to one request.

    Attributes:
        status: HTTP status; 0 until the head has come.
        headers: end-to-end headers, without Content-Length.
        content_type: without parameters, in lower case.
        length: the header Content-Length, or "".
        has_length: the server has declared the length of the body, or there is no body.
        ended: the whole answer has come.
        keeps: the connection can take a further request after the answer.
        is_until_close: the end of the connection is the end of the answer.
    """

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.content_type = ""
        self.length = ""
        self.has_length = False
        self.ended = False
        self.keeps = False
        self._method = method
        self._http: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._bytes_without_body = 0
        self._framing: dict[str, str] = {}
        self.is_until_close = False
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces of the body in data of the connection. Raises ValueError for data that are not HTTP."""
        if self.ended or self._http is None:
            self.keeps = False  # data after the answer
            return []
        try:
            self._http.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.ended:
                self.drop()
                is_switch = isinstance(error, httptools.HttpParserUpgrade)
                why = "the protocol was switched" if is_switch else str(error.__context__ or error)
                raise ValueError(why) from error
            self.keeps = False  # data after the answer
        pieces, self._pieces = self._pieces, []
        self._bytes_without_body = 0 if pieces else self._bytes_without_body + len(data)
        if self.ended:
            self.drop()
        elif self._bytes_without_body > LONGEST:
            self.drop()
            raise ValueError(f"more than {LONGEST} bytes without a piece of the body")
        return pieces

    def drop(self) -> None:
        """Read no more. The parser of llhttp refers to this object, and would keep it until a collection of garbage."""
        self._http = None

    # Calls of llhttp's parser.

    def on_message_begin(self) -> None:
        """Begin an answer, or a further one after an interim answer."""
        if self.ended:
            self.keeps = False  # data after the answer
        elif not self.status:
            self.headers, self._framing, self.content_type = [], {}, ""

    def on_header(self, raw_name: bytes, raw_value: bytes) -> None:
        """Take a header."""
        if self.status:
            return  # a trailer, or a header of data after the answer
        name = raw_name.decode(errors="surrogateescape")
        value = raw_value.decode(errors="surrogateescape").strip(" \t")
        lower = name.lower()
        if lower in HOP_BY_HOP or lower == "content-length":
            self._framing[lower] = f"{self._framing[lower]},{value}" if lower in self._framing else value
        else:
            self.headers.append((name, value))
            if lower == "content-type":
                self.content_type = value.partition(";")[0].strip().lower()

    def on_headers_complete(self) -> None:
        """Take the head. Interim answers are skipped."""
        assert self._http is not None
        status = self._http.get_status_code()
        if self.status or status < 200:
            return
        coding = self._framing.get("transfer-encoding")
        if coding is not None and coding.lower() != "chunked":
            raise ValueError(f"the transfer coding {coding[:80]!r} is unknown")
        options = {option.strip() for option in self._framing.get("connection", "").lower().split(",")}
        self.headers = [(name, value) for name, value in self.headers if name.lower() not in options]
        is_bodiless = self._method == "HEAD" or status in (204, 304)
        self.length = self._framing.get("content-length", "")
        self.has_length = is_bodiless or (coding is None and bool(self.length))
        self.keeps = self._http.should_keep_alive()
        self.is_until_close = coding is None and not self.has_length
        self.ended = is_bodiless
        self.status = status

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        if self.ended:
            self.keeps = False  # a body after a head that has none
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """End the answer."""
        self.ended = bool(self.status)
