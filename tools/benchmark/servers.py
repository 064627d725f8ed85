"""Servers as processes, and HTTP requests to servers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp


async def post_all(url: str, body: Mapping[str, Any], count: int, at_once: int, *, socket: str = "") -> list[float]:
    """POST ``count`` times, ``at_once`` in flight; return the seconds of each request.

    ``socket``: path of the server's Unix socket.
    """
    data = json.dumps(dict(body)).encode()
    headers = {"Content-Type": "application/json"}
    took: list[float] = []
    left = iter(range(count))
    connector = aiohttp.UnixConnector(socket, limit=0) if socket else aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask() -> None:
            for _ in left:
                started = time.perf_counter()
                async with session.post(url, data=data, headers=headers) as response:
                    await response.read()
                    response.raise_for_status()
                took.append(time.perf_counter() - started)

        await asyncio.gather(*(ask() for _ in range(at_once)))
    return took


@contextmanager
def server(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server that ends with its standard input."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def told(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return a server's announcement once it serves. Raises RuntimeError if the server ends first."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has ended with status {process.wait(30)}")
    facts: dict[str, Any] = json.loads(line)
    return facts


def announced(process: subprocess.Popen[bytes]) -> str:
    """Return the announced address of a server."""
    return str(told(process)["address"])


class Servers(ExitStack):
    """Servers that are processes; all end with the block."""

    def start(self, module: str, *command: str) -> subprocess.Popen[bytes]:
        """Start ``python -m MODULE`` without waiting."""
        return self.enter_context(server([sys.executable, "-m", module, *command]))

    def rlctl(self, *command: str, module: str = "rlctl") -> dict[str, Any]:
        """Start a server of rlctl, or of a ``module`` with the same interface; return the announcement."""
        return told(self.start(module, *command, "--log-level", "WARNING", "--end-with-parent"))

    def coordinator(self, directory: Path) -> str:
        """Start a coordinator with a journal in the directory; return the address."""
        return str(self.rlctl("coordinator", "--journal", str(directory / "journal.db"))["address"])


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, seconds: fields utime and stime of proc(5)'s stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
