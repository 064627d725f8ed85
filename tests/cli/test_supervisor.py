"""What owns a fleet goes on while it cannot tell anybody."""

from __future__ import annotations

import errno
import io
import sys
from pathlib import Path

import pytest

from rlctl.cli import state
from rlctl.cli.settings import Settings
from rlctl.cli.supervisor import _Supervisor
from rlctl.launch.deployment import Deployment


class Full(io.StringIO):
    """A log on a disk that is full."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_end_a_fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    holder = _Supervisor(Settings(), Deployment("lab", "127.0.0.1:0", ()))
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", Full().write)
        for _ in range(3):
            holder._tell_state(state.READY)
        assert capsys.readouterr().err.count("No space left on device") == 1, "told once"
        disk.setattr(sys, "stderr", Full())
        holder._say("actor-0: starting again")
        holder._tell_state(state.READY)
    assert state.read("lab") is None
    holder._tell_state(state.READY)
    found = state.read("lab")
    assert found is not None
    assert found.phase == state.READY
