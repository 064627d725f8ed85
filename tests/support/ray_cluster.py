"""A Ray cluster on this machine, with commands for its nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from up_helpers import WAIT_S


class Nodes:
    """A cluster; calls with a line change its nodes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._answer()["address"])

    def __call__(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


@contextmanager
def ray_cluster(directory: Path, *cores: int) -> Iterator[Nodes]:
    """Start nodes of these numbers of cores, as declared to Ray; the log goes into the directory."""
    program = Path(__file__).parent / "ray_nodes.py"
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(program), *map(str, cores)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        with process:
            yield Nodes(process)
            process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
