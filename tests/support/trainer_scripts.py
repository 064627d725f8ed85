"""Runs of a trainer's script, forked from a process that has imported torch."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forking import NURSERY

MOST_S = 120.0


@dataclass(frozen=True)
class Ended:
    """A script that has ended, with what it said."""

    returncode: int
    stdout: str
    stderr: str


async def ended(script: Path, *arguments: str) -> Ended:
    """Run a script to its end."""
    return await asyncio.to_thread(_run, [str(script), *arguments])


def _run(argv: Sequence[str]) -> Ended:
    with tempfile.TemporaryFile() as stderr, contextlib.closing(NURSERY.script(argv, stderr)) as process:
        try:
            told = process.stdout.read()
            code = process.wait(MOST_S)
        finally:
            process.kill()
        stderr.seek(0)
        return Ended(code, told.decode(), stderr.read().decode())
