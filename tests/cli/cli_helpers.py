"""The command line run inside a test, and a live fleet for it to talk to."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from rlctl.cli.main import root
from rlctl.runtime.event_loops import LoopThread
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec


@dataclass(frozen=True)
class Ran:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error on standard error as JSON."""
        return dict(json.loads(self.err)["error"])


Cli = Callable[..., Ran]


def run(*arguments: str, stdin: str | None = None) -> Ran:
    """Run ``rlctl ARGUMENTS`` in this process."""
    result = CliRunner().invoke(root, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


class LiveFleet:
    """An in-process fleet on a thread of its own."""

    def __init__(self, fleet: InProcessFleet, loop: LoopThread) -> None:
        self.fleet = fleet
        self.loop = loop

    @property
    def endpoint(self) -> str:
        """Address of its coordinator."""
        return self.fleet.server.address

    def __call__(self, *arguments: str, stdin: str | None = None) -> Ran:
        """Run ``rlctl --endpoint … ARGUMENTS``."""
        return run("--endpoint", self.endpoint, *arguments, stdin=stdin)

    def model_path(self, slot: str) -> str:
        """Checkpoint of a stage; faults are injected under it."""
        return next(spec.model_path for spec in self.fleet.specs if spec.slot == slot)

    def held(self) -> list[str]:
        """What the ranks hold."""
        from updating import weights

        async def read() -> list[str]:
            return weights(self.fleet)

        return self.loop.call(read())

    def state(self, slot: str) -> int:
        """State of a stage as the coordinator sees it."""

        async def read() -> int:
            return self.fleet.stage(slot).state

        return self.loop.call(read())


@contextlib.contextmanager
def started(journal: Path, specs: Sequence[StageSpec], **settings: Any) -> Iterator[LiveFleet]:
    """A fleet of these stages, up inside the block."""
    loop = LoopThread("fleet under test")
    fleet = InProcessFleet(journal, specs, **settings)
    loop.call(fleet.__aenter__())
    try:
        yield LiveFleet(fleet, loop)
    finally:
        loop.call(fleet.__aexit__(None, None, None))
        loop.stop()
