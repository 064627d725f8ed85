"""Callers of a data port without a valid token: the answer, and the log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rlctl.ports import SystemClock
from rlctl.stage.data_port.server import DataPort


async def answer(address: str, request: bytes) -> bytes:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request + b"Host: x\r\nConnection: close\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_callers_without_a_token_write_no_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    unused: Any = None
    port = DataPort(lambda: unused, lambda: unused, SystemClock(), token="secret")
    address = await port.start("127.0.0.1:0", [])
    caplog.set_level(logging.DEBUG)
    forged = await answer(address, b"GET /x%0AERROR:coordinator:forged HTTP/1.1\r\n")
    assert forged.startswith(b"HTTP/1.1 401")
    not_ascii = await answer(address, b"GET /x HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n")
    assert not_ascii.startswith(b"HTTP/1.1 401")
    assert b"TOKEN_INVALID" in not_ascii
    await port.stop()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("rlctl")]
    assert [line.partition(" from ")[0] for line in lines] == ["unknown route"]
    assert not any("forged" in line or "\n" in line for line in lines)
