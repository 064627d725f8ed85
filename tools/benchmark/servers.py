"""Servers in processes of their own, and requests to those that speak HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp


async def post_all(url: str, body: Mapping[str, Any], count: int, at_once: int) -> list[float]:
    """POST ``count`` times, ``at_once`` at any time; how long each took, seconds."""
    data = json.dumps(dict(body)).encode()
    headers = {"Content-Type": "application/json"}
    took: list[float] = []
    left = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

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
    """A server that ends with its standard input."""
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
    """What a server says of itself once it serves. Raises RuntimeError when it ends instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} has ended with status {process.wait(30)}")
    facts: dict[str, Any] = json.loads(line)
    return facts


def announced(process: subprocess.Popen[bytes]) -> str:
    """The address that a server says it has."""
    return str(told(process)["address"])


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, seconds: fields utime and stime of proc(5)'s stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
