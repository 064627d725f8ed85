"""A router process that goes wrong, without the real binary."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from rlctl.cli.commands.gateway import gateway
from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.router import process
from rlctl.gateway.router.process import SglangRouter
from rlctl.runtime import kills


def test_one_that_does_not_answer_in_time_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "sglang-router"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o700)
    monkeypatch.setattr(process, "program", lambda: str(mute))
    monkeypatch.setattr(process, "START_S", 0.2)
    router = SglangRouter(log=tmp_path / "log")
    with pytest.raises(RlctlError) as caught:
        router.start()
    assert caught.value.reason is Reason.ENGINE_FAILED
    assert router.ended, "whoever keeps it starts it again"
    router.stop()
    assert not router.ended


class Undying(subprocess.Popen[bytes]):
    """A process in a system call that does not return."""

    def terminate(self) -> None:
        pass

    kill = terminate


@pytest.fixture
def undying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Undying]]:
    launched: list[Undying] = []

    def popen(*arguments: Any, **options: Any) -> Undying:
        launched.append(Undying(*arguments, **options))
        return launched[-1]

    monkeypatch.setattr(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))
    yield launched
    for each in launched:
        os.kill(each.pid, signal.SIGKILL)
        each.wait()


@pytest.mark.parametrize("starts", [True, False])
def test_one_that_no_kill_ends_is_named_and_not_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    undying: list[Undying],
    starts: bool,
) -> None:
    mute = tmp_path / "sglang-router"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o700)
    monkeypatch.setattr(process, "program", lambda: str(mute))
    monkeypatch.setattr(process, "START_S", 0.2)
    monkeypatch.setattr(process, "CALL_S", 0.2)
    monkeypatch.setattr(kills, "KILLED_S", 0.2)
    router = SglangRouter(log=tmp_path / "log")
    began = time.monotonic()
    if starts:
        monkeypatch.setattr(router, "workers", dict)
        router.start()
        router.stop()
        said = caplog.text
    else:
        with pytest.raises(RlctlError) as caught:
            router.start()
        said = str(caught.value)
    assert time.monotonic() - began < 5
    assert f"sglang-router (pid {undying[0].pid}) was killed and has not ended" in said
    assert f"See also {tmp_path / 'log'}." in said


def test_an_interrupt_of_the_terminal_is_not_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "sglang-router"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(process, "program", lambda: str(silent))
    router = SglangRouter(log=tmp_path / "log")
    monkeypatch.setattr(router, "workers", dict)
    with router:
        assert os.getpgid(router.pid) != os.getpgid(0)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 200 OK\r\n\r\n{", b"?\r\n"]
)
def test_an_answer_that_breaks_off_is_a_connection_that_did(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        router = SglangRouter(port=listener.getsockname()[1])
        with pytest.raises(OSError, match="broke off"):
            router.workers()
        server.join()


def test_an_access_file_does_not_guard_a_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RLCTL_TOKEN", "RLCTL_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)
    router = ["--router-backend", "sglang-router", "--router-listen", "0.0.0.0:0"]
    options = ["--coordinator", "127.0.0.1:1", "--access-file", str(tmp_path / "access.json"), *router]
    result = CliRunner().invoke(gateway, options)
    assert isinstance(result.exception, RlctlError)
    assert result.exception.reason is Reason.INSECURE_BIND
