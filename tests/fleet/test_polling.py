"""How gRPC waits for sockets in a process of rlctl's: without threads that have to be woken for every message."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CALLS = 300

ECHO = """
import asyncio, json, os, pathlib, sys
{first}
from rlctl.transport import POLLED, grpc

async def echo(request, context):
    return request

def woken():
    "How often gRPC's own threads have slept since they began."
    there = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "event_engine":
            there += int((task / "status").read_text().split("nonvoluntary")[0].split()[-1])
    return there

async def main():
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", {{"Say": handler}}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        say = channel.unary_unary("/t.Echo/Say")
        await say(b"first")
        before = woken()
        for _ in range({calls}):
            assert await say(b"again") == b"again"
        print(json.dumps([POLLED, woken() - before, "GRPC_EXPERIMENTS" in os.environ]))
    await server.stop(None)

asyncio.run(main())
"""


def echoed(first: str = "", **variables: str) -> tuple[bool, int, bool]:
    code = ECHO.format(first=first, calls=CALLS)
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60.0
    )
    assert done.stderr == ""
    polled, woken, inherited = json.loads(done.stdout)
    return polled, woken, inherited


def test_nobody_is_woken_for_a_message_but_who_waits_for_it() -> None:
    polled, woken, inherited = echoed()
    assert (polled, inherited) == (True, False)
    assert woken < CALLS / 2


@pytest.mark.parametrize(
    ("first", "variables"),
    [("import grpc", {}), ("", {"GRPC_EXPERIMENTS": ""})],
    ids=["somebody had imported gRPC", "somebody has chosen"],
)
def test_what_others_have_chosen_stays(first: str, variables: dict[str, str]) -> None:
    polled, woken, inherited = echoed(first, **variables)
    assert (polled, inherited) == (False, bool(variables))
    assert woken > CALLS
