"""Commands that wait for a supervisor that takes no step any more (SIGSTOP, a disk that does not answer)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlctl.cli.app.exit_codes import Exit
from rlctl.contract.errors import DeadlineExceeded
from rlctl.integrations.child_fleet import Up
from rlctl.launch.engine_lifecycle import START_S
from rlctl.launch.supervisor import fleet_state

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("default_signals")]

STUCK_S = 2.0
GIVES_UP_S = 30.0
"""Seconds after which a stopped supervisor is killed, so that a test that fails ends."""


@pytest.fixture
def slow(tmp_path: Path) -> list[str]:
    """Flags of a fleet with an engine that never loads."""
    checkpoint = tmp_path / "slow"
    checkpoint.mkdir()
    os.mkfifo(checkpoint / "weights.txt")
    return ["--hf-checkpoint", str(checkpoint), "--engine", "fake", "--listen", "127.0.0.1:0"]


@contextlib.contextmanager
def stopped(name: str) -> Iterator[queue.Queue[int]]:
    """Stop the supervisor of a fleet once it has started; yields its pid. It is killed afterwards."""
    pids: queue.Queue[int] = queue.Queue()
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            state = fleet_state.read(name)
            if state is not None and state.alive and state.endpoint:
                os.kill(state.pid, signal.SIGSTOP)
                pids.put(state.pid)
                over.wait(GIVES_UP_S)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, signal.SIGKILL)
                return

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        yield pids
    finally:
        over.set()
        stopping.join()


SCRIPT = f"""
from rlctl.cli.main import main
from rlctl.launch.supervisor import fleet_state

fleet_state.STUCK_S = {STUCK_S}
main()
"""


def rlctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``rlctl ARGUMENTS`` as a process of its own, which does not wait for a stuck supervisor for long."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * GIVES_UP_S)


def test_a_detached_start_ends_if_its_supervisor_takes_no_step(slow: list[str]) -> None:
    assert fleet_state.STUCK_S > START_S, "the longest wait within a step"
    with stopped("default") as pids:
        ran = rlctl("up", *slow, "--detach")
        pid = pids.get(timeout=GIVES_UP_S)
    assert ran.returncode == Exit.TIMEOUT, ran.stderr
    assert f"supervisor {pid} of fleet 'default' has taken no step for 2 s" in ran.stderr
    assert f"`kill -CONT {pid}`" in ran.stderr


def test_a_change_ends_if_its_supervisor_takes_no_step(checkpoint: Callable[[str], str]) -> None:
    up = ["up", "--hf-checkpoint", checkpoint("one"), "--engine", "fake", "--listen", "127.0.0.1:0", "--detach"]
    assert subprocess.run([sys.executable, "-m", "rlctl", *up], check=False).returncode == 0
    with stopped("default") as pids:
        pid = pids.get(timeout=GIVES_UP_S)
        ran = rlctl("restart", "actor-0", "--yes")
    assert ran.returncode == Exit.TIMEOUT, ran.stderr
    assert f"supervisor {pid} of fleet 'default' has taken no step for 2 s" in ran.stderr


def test_a_trainers_own_fleet_ends_if_its_supervisor_takes_no_step(
    slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_state, "STUCK_S", STUCK_S)
    monkeypatch.setattr("rlctl.integrations.child_fleet.STOP_S", 0.1)
    with stopped("lab"), pytest.raises(DeadlineExceeded, match="of fleet 'lab' has taken no step for 2 s"):
        Up("lab", slow)
    state = fleet_state.read("lab")
    assert state is None or not state.alive
