"""What a stage server that was killed leaves of a server that was just starting."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rlctl_servers.server import process as process_module
from rlctl_servers.server.http import Http
from rlctl_servers.server.process import ServerProcess
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError

STAGE = """
import asyncio, sys
from rlctl_servers.server.http import Http
from rlctl_servers.server.process import ServerProcess

class Starting(ServerProcess):
    def command(self):
        return ["-c", sys.argv[1]]

    def environment(self):
        return {}

    async def ready(self):
        return False

asyncio.run(Starting(Http("Test", "http://127.0.0.1:1"), sys.executable, 600).start(print))
"""

SERVER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
keeps = subprocess.Popen(["sleep", "600"], stdin=worker.stdin)
print(worker.pid, flush=True)
worker.wait()
"""
"""A server whose worker does not notice that it has ended: another process keeps the pipe open."""


def test_every_process_of_the_server_ends_with_the_stage_server() -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "engines")}
    command = [sys.executable, "-c", STAGE, SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as stage:
        assert stage.stderr is not None
        try:
            server = psutil.Process(int(stage.stderr.readline().removeprefix("test: ")))
            everything = psutil.Process(stage.pid).children(recursive=True)
        finally:
            stage.kill()
        assert server in everything
        assert len(everything) >= 4, "server, worker, what keeps its pipe, and the watcher"
        assert psutil.wait_procs(everything, timeout=30)[1] == []


class Sleeping(ServerProcess):
    """A server that is never ready."""

    def command(self) -> list[str]:
        return ["-c", "import time; time.sleep(600)"]

    def environment(self) -> dict[str, str]:
        return {}

    async def ready(self) -> bool:
        return False


async def test_a_launch_that_fails_half_way_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no process left for the watcher."""
    process = Sleeping(Http("Test", "http://127.0.0.1:1"), sys.executable, 600)
    launched: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if launched:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        launched.append(subprocess.Popen(*arguments, **options))
        return launched[0]

    with monkeypatch.context() as patch:
        patch.setattr(process_module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
        with pytest.raises(BlockingIOError):
            await process.start(lambda _: None)
        await process.stop()
    assert launched[0].wait(10) is not None


FIRST = """
import subprocess, sys
print(subprocess.Popen(["sleep", "600"], start_new_session=sys.argv[1] == "alone").pid, flush=True)
"""


class Leaving(Sleeping):
    """The first process of the server ends at once. A second process keeps the output."""

    where = ""

    def command(self) -> list[str]:
        return ["-c", FIRST, self.where]


@pytest.mark.parametrize("where", ["beside", "alone"])
async def test_a_stuck_process_of_a_server_does_not_hide_its_end(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A process in a group of its own outlives the kill, like a process in a stuck driver."""
    monkeypatch.setattr(process_module, "FOLLOW_S", 0.2)
    process = Leaving(Http("Test", "http://127.0.0.1:1"), sys.executable, 60)
    process.where = where
    ended: list[RlctlError] = []
    with pytest.raises(RlctlError) as caught:
        await process.start(ended.append)
    await process.stop()
    assert caught.value.reason is Reason.ENGINE_FAILED
    assert [error.reason for error in ended] == [Reason.ENGINE_FAILED]
    if where == "alone":
        os.kill(int(process.log_lines()[0]), signal.SIGKILL)
    await eventually(lambda: not process_module.members(process.pid))


async def test_a_stuck_process_of_an_ended_server_is_reported_at_the_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "FOLLOW_S", 0.2)
    monkeypatch.setattr(process_module, "TERM_S", 0.2)
    process = Leaving(Http("Test", "http://127.0.0.1:1"), sys.executable, 60)
    process.where = "beside"
    with monkeypatch.context() as stuck:
        stuck.setattr(process, "_signal", lambda _: None)
        with pytest.raises(RlctlError):
            await process.start(lambda _: None)
        await process.stop()
    assert f"Test (pid {process.log_lines()[0]}) was killed and has not ended" in caplog.text
    process.kill()
    await eventually(lambda: not process_module.members(process.pid))


async def test_a_server_that_no_kill_ends_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "TERM_S", 0.2)
    process = Sleeping(Http("Test", "http://127.0.0.1:1"), sys.executable, 0.5)
    with pytest.raises(RlctlError):
        await process.start(lambda _: None)
    assert process._popen is not None
    with monkeypatch.context() as stuck:
        stuck.setattr(process._popen, "terminate", lambda: None)
        stuck.setattr(process, "_signal", lambda _: None)
        await process.stop()
    assert f"Test (pid {process.pid}) was killed and has not ended" in caplog.text
    process.kill()
    assert process._wait(30)


TALKING = """
import pathlib, sys, time
for _ in range(4000):
    print("x" * 99)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""

LOGGING = """
import asyncio, pathlib, sys
from rlctl_servers.server.http import Http
from rlctl_servers.server.process import ServerProcess

class Talking(ServerProcess):
    def command(self):
        return ["-c", sys.argv[1], sys.argv[2]]

    def environment(self):
        return {}

    async def ready(self):
        return pathlib.Path(sys.argv[2]).exists()

async def main():
    process = Talking(Http("Test", "http://127.0.0.1:1"), sys.executable, 20)
    await process.start(print)
    print("ready", flush=True)
    await process.stop()

asyncio.run(main())
"""


def test_a_log_on_a_full_disk_does_not_stop_the_server(tmp_path: Path) -> None:
    """The server would wait for the reader of its output."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[3] / "engines")}
    command = [sys.executable, "-c", LOGGING, TALKING, str(tmp_path / "ready")]
    with open("/dev/full", "w") as full:
        stage = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, env=environment, timeout=60, check=False)
    assert stage.stdout == b"ready\n"
