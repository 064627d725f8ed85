"""Whatever a request is made of beside its body: a status that says so, never a defect's, and a fleet as it was."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import aiohttp
import pytest

from rlctl.testing.in_process_fleet import InProcessFleet

PAUSES = {
    "sglang": "/pause_generation",
    "slime": "/engines/a/pause_generation",
    "omni": "/pause_generation",
    "vllm": "/pause",
}
LISTS = {"sglang": "/server_info", "slime": "/workers", "omni": "/workers", "vllm": "/servers"}
READS = {"sglang": "/get_weight_version", "slime": "/get_weight_version", "omni": "/model_info", "vllm": "/is_paused"}

ODD = (b"\xff", "é".encode(), b"a\tb", b"\xed\xa0\x80", b"x" * 3000)
"""What a header may hold: no UTF-8, no ASCII, a tab, a surrogate, much."""

GENERATE = b'{"text": "x", "sampling_params": {"max_new_tokens": 1}}'


async def status(http: aiohttp.ClientSession, *lines: bytes, body: bytes = b"", length: int | None = None) -> int:
    """Of the answer to a request of these lines; 0: there was none."""
    assert http._base_url is not None
    reader, writer = await asyncio.open_connection(http._base_url.host, http._base_url.port)
    head = [*lines, b"Connection: close"]
    if not any(line.lower().startswith((b"content-length", b"transfer-encoding")) for line in lines):
        head.append(b"Content-Length: %d" % (len(body) if length is None else length))
    if not any(line.startswith(b"Host") for line in lines):
        head.append(b"Host: x")
    try:
        writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        if length is not None and length > len(body):
            writer.write_eof()
        async with asyncio.timeout(20):
            first = await reader.readline()
            await reader.read()
        return int(first.split()[1]) if first else 0
    finally:
        writer.close()
        await asyncio.wait({asyncio.ensure_future(writer.wait_closed())})


@pytest.mark.parametrize("name", PAUSES)
async def test_no_request_finds_a_defect(
    fleet: InProcessFleet, open_gateway: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    post, read = b"POST %s HTTP/1.1" % PAUSES[name].encode(), b"GET %s HTTP/1.1" % READS[name].encode()
    listed, generate = b"GET %s HTTP/1.1" % LISTS[name].encode(), b"POST /generate HTTP/1.1"
    found = {}
    async with open_gateway(fleet.server.address, name) as http:

        async def tried(*lines: bytes, **given: Any) -> None:
            found[lines, str(given)[:60]] = await status(http, *lines, **given)

        for odd in ODD:
            await tried(post, b"Authorization: Bearer " + odd, body=b"{")
            await tried(post, b"Idempotency-Key: " + odd, body=b"{")
            await tried(read, b"Authorization: Bearer " + odd)
            await tried(read, b"Expect: " + odd)
            for line in (read, listed):
                await tried(line, b"Host: " + odd)
                await tried(line, b"X-Forwarded-Proto: " + odd)
            for header in (b"X-Session-ID", b"X-SMG-Routing-Key", b"X-RLCTL-Min-Version", b"Authorization: Bearer"):
                await tried(generate, header + (b" " if b":" in header else b": ") + odd, body=GENERATE)
        for encoding in (b"gzip", b"deflate", b"br", b"zstd", b"nonsense"):
            await tried(post, b"Content-Encoding: " + encoding, body=b"no such thing")
        await tried(post, b"Content-Encoding: gzip", body=gzip.compress(b"[" * 10_000_000))
        for chunks in (b"ZZ\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n", b"2\r\n{}0\r\n\r\n"):
            await tried(post, b"Transfer-Encoding: chunked", body=chunks)
        await tried(post, body=b"{", length=100)
        for slot in (b"%ff", b"%00", b"%2F", b"..", b"%ed%a0%80", b"a" * 3000, b"%C3%A9"):
            await tried(b"GET /engines/" + slot + READS[name].encode() + b" HTTP/1.1")
            await tried(b"POST /engines/" + slot + b"/generate HTTP/1.1", body=GENERATE)
        for query in (
            b"?%ff=%ff",
            b"?mode=%ff",
            b"?" + b"a=1&" * 1000,
            b"?timeout=%00",
            b"?url=%ff",
            b"?session_id=%ff",
        ):
            await tried(b"POST %s%s HTTP/1.1" % (PAUSES[name].encode(), query), body=b"{")
            await tried(b"GET %s?%s HTTP/1.1" % (READS[name].encode(), query))
        for method in (b"HEAD", b"OPTIONS", b"PATCH", b"TRACE"):
            await tried(b"%s %s HTTP/1.1" % (method, PAUSES[name].encode()))
        await tried(post, b"Expect: nonsense", body=b"{")
    wrong = {what: got for what, got in found.items() if got >= 500}
    assert not wrong
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert not fleet.server.coordinator.operations.newest_first("PauseGeneration", 0)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
