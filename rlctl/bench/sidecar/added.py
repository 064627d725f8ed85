"""The same requests at an upstream and through the sidecar in front of it, taking turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rlctl import loops
from rlctl.bench.figures import Reading, Setting
from rlctl.bench.rounds import Spread, interleaved, median

PROMPT = [5 + i % 1000 for i in range(512)]
TOKENS = 128
MANY = 64

THROUGH = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0},
    "return_logprob": True,
}
STRAIGHT = {
    "token_ids": PROMPT,
    "request_id": "r",
    "output_mode": "text",
    "sampling_params": {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0},
}


@dataclass(frozen=True)
class Pair:
    """Both ends.

    Attributes:
        straight, through: addresses to POST to.
        pid: process of the sidecar.
    """

    straight: str
    through: str
    pid: int


@contextmanager
def running(setting: Setting) -> Iterator[Pair]:
    """An upstream and a sidecar, each a process."""
    del setting
    with ExitStack() as stack:
        upstream = stack.enter_context(_process([sys.executable, "-m", "rlctl.bench.sidecar.upstream"]))
        address = _announced(upstream)
        command = [sys.executable, "-m", "rlctl", "sidecar", "vllm", "--upstream", address, "--end-with-parent"]
        sidecar = stack.enter_context(_process([*command, "--coordinator", "nobody:1", "--log-level", "WARNING"]))
        yield Pair(f"{address}/inference/v1/generate", f"{_announced(sidecar)}/generate", sidecar.pid)


def latency_alone(setting: Setting) -> Reading:
    """One request at a time: median through the sidecar less median straight, round by round."""
    pair = setting.shared(running)
    count = 30 if setting.quick else 300
    sides = {
        "straight": lambda: loops.run(_ask(pair.straight, STRAIGHT, count, 1)),
        "through": lambda: loops.run(_ask(pair.through, THROUGH, count, 1)),
    }
    took = interleaved(setting.rounds, sides)
    straight = [median(each) * 1000 for each in took["straight"]]
    through = [median(each) * 1000 for each in took["through"]]
    spread = Spread.of([a - b for a, b in zip(through, straight, strict=True)])
    return Reading.of(spread, floor=median(straight), floor_unit="ms", through_ms=median(through))


def cpu_of_many(setting: Setting) -> Reading:
    """CPU time of the sidecar while 64 requests are under way at any time, by request."""
    pair = setting.shared(running)
    count = 4 * MANY if setting.quick else 32 * MANY
    used = []
    for number in range(setting.rounds + 1):
        before = _cpu_s(pair.pid)
        loops.run(_ask(pair.through, THROUGH, count, MANY))
        if number:
            used.append((_cpu_s(pair.pid) - before) / count * 1000)
    return Reading.of(Spread.of(used), requests=count)


async def _ask(url: str, body: dict[str, Any], count: int, at_once: int) -> list[float]:
    """POST ``count`` times, ``at_once`` at any time; how long each took, seconds."""
    data = json.dumps(body).encode()
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
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
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


def _announced(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline())["address"])


def _cpu_s(pid: int) -> float:
    """CPU time that a process has used, seconds: fields utime and stime of proc(5)'s stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
