"""What goes over a connection beside messages: nothing, while messages do."""

from __future__ import annotations

import asyncio
import contextlib

from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.v1.verbs_pb2 import GetServerInfoRequest

PREFACE, HEAD = 24, 9
PING = 6


def frames(data: bytes) -> list[int]:
    """The types of the HTTP/2 frames (RFC 9113, 4.1) in what came over a connection."""
    found, at = [], 0
    while at + HEAD <= len(data):
        found.append(data[at + 3])
        at += HEAD + int.from_bytes(data[at : at + 3])
    return found


async def test_no_pings_measure_the_connection(fleet: InProcessFleet) -> None:
    said = {"caller": b"", "stage": b""}
    host, port = fleet.stages["a"].address.split(":")

    async def pump(who: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                said[who] += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_stage = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump("caller", reader, to_stage[1]), pump("stage", to_stage[0], writer))

    proxy = await asyncio.start_server(between, "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}") as channel:
        for _ in range(20):
            await StageServiceStub(channel).GetServerInfo(GetServerInfoRequest())
        kinds = frames(said["caller"][PREFACE:]) + frames(said["stage"])
    assert len(kinds) >= 100, "headers and data, both ways"
    assert PING not in kinds
    proxy.close()
    await proxy.wait_closed()
