"""Helpers for tests of ``rlctl up``: the command, the supervisor's state, concurrent requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forking import NURSERY

from rlctl.contract.errors import RlctlError
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.launch.supervisor import fleet_state
from rlctl.sdk.blocking import Fleet
from rlctl.v1.fleet_pb2 import Stage

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi-model.yaml"
WAIT_S = 60.0


def rlctl_command(*arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    return NURSERY.run(*arguments, timeout_s=timeout_s)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def when(fleet: Fleet, condition: Callable[[dict[str, Stage]], object]) -> dict[str, Stage]:
    """Return the stages by slot, once ``condition`` holds; checked at every change."""
    with contextlib.closing(fleet.watch()) as events:
        for _ in events:
            now = {stage.registration.slot: stage for stage in fleet.status().stages}
            if condition(now):
                return now
    raise AssertionError("the coordinator ended the watch")


def restarted(
    launched: LaunchedFleet, fleet: Fleet, slot: str, serves: Callable[[Stage], object] = lambda stage: True
) -> dict[str, Stage]:
    """Restart an engine and wait until every stage is routable and ``serves``; return the stages by slot.

    The status right after the restart may be the former process's, so this waits for the new incarnation.
    """
    before = next(stage.incarnation for stage in fleet.status().stages if stage.registration.slot == slot)
    launched.restart(slot)
    return when(
        fleet,
        lambda now: (
            slot in now
            and now[slot].incarnation > before
            and all(stage.routable and serves(stage) for stage in now.values())
        ),
    )


def known(name: str) -> fleet_state.FleetState:
    found = fleet_state.read(name)
    assert found is not None
    return found


class Load:
    """Sequential requests from several threads; records failures and outdated answers."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self.done = 0
        self.wrong: list[object] = []
        self.least = 1
        self._fleet = fleet
        self._model = model
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            least = self.least
            try:
                answer = self._fleet.generate("1+2=", model=self._model, max_new_tokens=16)
            except RlctlError as error:
                self.wrong.append(str(error))
            else:
                self.done += 1
                sequences = [span.version.sequence for sample in answer.samples for span in sample.versions]
                if not sequences or min(sequences) < least:
                    self.wrong.append((answer.slot, sequences, least))


@contextmanager
def own_state(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """Use separate state directories, and stop their running fleets at the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(directory / "config"))
    for name in ("ENDPOINT", "TOKEN", "TOKEN_FILE", "OUTPUT", "TLS_CA", "TLS_CERT", "TLS_KEY"):
        monkeypatch.delenv(f"RLCTL_{name}", raising=False)
    yield
    for name in (directory / "state" / "rlctl").glob("*"):
        left = fleet_state.read(name.name)
        if left is not None and left.alive:
            os.kill(left.pid, signal.SIGTERM)
            until(lambda left=left: not left.alive, "the supervisor did not end")  # type: ignore[misc]
