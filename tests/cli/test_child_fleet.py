"""A trainer process with a fleet of its own, and a stuck `rlctl up`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from rlctl.integrations import child_fleet
from rlctl.integrations.child_fleet import Up
from rlctl.runtime import kills


def test_a_supervisor_that_no_kill_ends_is_reported_and_not_waited_for(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Up("lab", ["--hf-checkpoint", checkpoint("one"), "--engine", "fake", "--listen", "127.0.0.1:0"])
    pid = fleet.state.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as stuck:
            stuck.setattr(child_fleet, "STOP_S", 0.1)
            stuck.setattr(kills, "KILLED_S", 0.1)
            stuck.setattr(fleet._process, "kill", lambda: None)
            began = time.monotonic()
            fleet.stop()
            assert time.monotonic() - began < 5
    finally:
        os.kill(pid, signal.SIGCONT)
        fleet.stop()
    assert f"`rlctl up` of fleet 'lab' (pid {pid}) was killed and has not ended" in caplog.text
    assert "dmesg" in caplog.text
