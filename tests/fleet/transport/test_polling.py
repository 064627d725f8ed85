"""How gRPC waits for sockets in a process of rlctl's: without threads that have to be woken for every message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from rlctl import transport

CALLS = 300
RELEASE = tuple(int(part) for part in version("grpcio").split(".")[:2])

can_choose = pytest.mark.skipif(
    RELEASE > transport.KNOWN_UP_TO, reason="of this release of gRPC it is not known whether it has the choice"
)

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


def run(code: str, **variables: str) -> str:
    """What the code prints. gRPC's messages of level INFO (a GOAWAY at the end, now and then) are left out."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | variables
    environment["GRPC_VERBOSITY"] = "ERROR"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60.0
    )
    assert done.stderr == ""
    return done.stdout


def echoed(first: str = "", **variables: str) -> tuple[bool, int, bool]:
    polled, woken, inherited = json.loads(run(ECHO.format(first=first, calls=CALLS), **variables))
    return polled, woken, inherited


@can_choose
def test_nobody_is_woken_for_a_message_but_who_waits_for_it() -> None:
    polled, woken, inherited = echoed()
    assert (polled, inherited) == (True, False)
    assert woken < CALLS / 2


@can_choose
@pytest.mark.parametrize(
    "module",
    [
        "coordinator.server",
        "stage.server",
        "worker.server",
        "gateway.prefork",
        "sdk.blocking",
        "sdk.aio",
        "launch.embedded",
    ],
)
def test_whatever_is_imported_first_imports_grpc_by_the_one_door(module: str) -> None:
    code = f"import rlctl.{module}\nfrom rlctl.transport import POLLED\nprint(POLLED)"
    assert run(code) == "True\n"


@pytest.mark.parametrize(
    ("first", "variables"),
    [("import grpc", {}), ("", {"GRPC_EXPERIMENTS": ""})],
    ids=["somebody had imported gRPC", "somebody has chosen"],
)
def test_what_others_have_chosen_stays(first: str, variables: dict[str, str]) -> None:
    polled, woken, inherited = echoed(first, **variables)
    assert (polled, inherited) == (False, bool(variables))
    assert woken > CALLS
