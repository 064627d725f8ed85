"""Runs of a trainer's script, by default forked from a process that has imported torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
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


async def ended(script: Path, *arguments: str, python: str = "", **environ: str) -> Ended:
    """Run a script to its end. ``python``: an interpreter with other packages; without it the script is forked.

    ``environ``: variables beside those of this process.
    """
    argv = [str(script), *arguments]
    return await asyncio.to_thread(_run, [python, *argv] if python else argv, environ, forked=not python)


def _run(argv: Sequence[str], environ: Mapping[str, str], *, forked: bool) -> Ended:
    if not forked:
        done = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        return Ended(done.returncode, done.stdout, done.stderr)
    with tempfile.TemporaryFile() as stderr, contextlib.closing(NURSERY.script(argv, stderr, environ)) as process:
        try:
            told = process.stdout.read()
            code = process.wait(MOST_S)
        finally:
            process.kill()
        stderr.seek(0)
        return Ended(code, told.decode(), stderr.read().decode())
