"""Servers in separate network or mount namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlctl.runtime.server_process import ANNOUNCEMENT

STOP_S = 15.0

OWN_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""Runs a command with its own shared memory, like a separate host."""


def need(*command: str) -> None:
    """Skip the test, with the reason, if this machine does not permit a command."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"`{' '.join(command)}` is not permitted here: {why.strip()}")


@contextmanager
def serving(place: Sequence[str], *arguments: str, log: Path) -> Iterator[dict[str, str]]:
    """Run ``rlctl ARGUMENTS`` by the command ``place``; yield its announcement. The process is ended by its id."""
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [*place, sys.executable, "-m", "rlctl", *arguments, "--end-with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if ANNOUNCEMENT in line:
                yield json.loads(line)
                break
        else:
            raise AssertionError(f"{arguments} ended with {process.wait()}: {log.read_text()[-2000:]}")
    finally:
        process.terminate()
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
