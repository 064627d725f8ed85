"""The replying end of ZeroMQ reads what a REQ socket sends, and refuses everything else."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any, cast

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.zmq_reply import ReplySocket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity" + bytes(4)
HELLO = GREETING + bytes([4, len(READY)]) + READY


class Written:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass


async def talk(sent: bytes, messages: int = 1, most: int = 1000) -> tuple[list[bytes], bytes]:
    """The messages that a peer's bytes are, and what it got for them."""
    reader, written = asyncio.StreamReader(), Written()
    reader.feed_data(sent)
    reader.feed_eof()
    socket = ReplySocket(reader, cast("Any", written), "zmq", most)
    await socket._greet()
    read = []
    for _ in range(messages):
        read.append(await socket.receive(1.0))
        await socket.reply(b"")
    return read, written.data


def request(body: bytes) -> bytes:
    head = bytes([0, len(body)]) if len(body) < 256 else b"\x02" + struct.pack(">Q", len(body))
    return b"\x01\0" + head + body


async def test_requests_of_any_length_are_read_and_replied_to() -> None:
    read, written = await talk(HELLO + request(b"one") + request(b"x" * 999), 2)
    assert read == [b"one", b"x" * 999]
    assert written[:10] == GREETING[:10]
    assert b"\x05READY\x0bSocket-Type\0\0\0\x03REP" in written
    assert written.endswith(b"\x01\0\0\0" * 2)


async def test_a_ping_is_answered() -> None:
    ping = b"\x04PING" + b"\0\x05" + b"context"
    read, written = await talk(HELLO + bytes([4, len(ping)]) + ping + request(b"one"))
    assert read == [b"one"]
    pong = b"\x04PONGcontext"
    assert bytes([4, len(pong)]) + pong in written


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n".ljust(64), "ZMTP 3"),
        (GREETING.replace(b"NULL\0", b"PLAIN"), "ZMTP 3"),
        (HELLO.replace(b"REQ", b"PUB"), "no REQ socket"),
        (HELLO + b"\0\x03one", "of one part"),
        (HELLO + b"\x01\0\x01\x01a\0\x01b", "of one part"),
        (HELLO + b"\x01\0\x02" + struct.pack(">Q", 1 << 60), "frame of"),
        (HELLO + b"\x01\0\x01\xff" + b"x" * 255 + b"\x02" + struct.pack(">Q", 800), "frame of"),
        (HELLO + b"\x09\0", "flags 9"),
    ],
)
async def test_what_is_no_request_is_refused(sent: bytes, cause: str) -> None:
    with pytest.raises(RlctlError, match=cause) as caught:
        await talk(sent)
    assert caught.value.reason is Reason.FIELD_INVALID


async def test_mutated_streams_end_in_an_error_or_in_data() -> None:
    random_ = random.Random(36)
    good = HELLO + request(b"one") + request(b"two" * 200)
    reasons = set()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(random_.randrange(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        reasons.add(await outcome(bytes(data[: random_.randrange(1, len(data) + 1)])))
    assert reasons == {Reason.FIELD_INVALID, Reason.UNREACHABLE, None}


async def outcome(sent: bytes) -> Reason | None:
    try:
        await talk(sent, 2)
    except RlctlError as error:
        return error.reason
    except EOFError:
        pass  # while greeting, as connect() says
    return None
