"""An attached server has one stage server at a time: a claim that ends with its process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rlctl_servers.server import server
from rlctl_servers.server.claim import Claim, place_id
from rlctl_servers.server.http import Http

from rlctl.contract.errors import Reason, RlctlError

URL = "http://127.0.0.1:7"
OTHER = """
import sys
from rlctl_servers.server.claim import Claim
from rlctl.contract.errors import RlctlError

try:
    claim = Claim("vLLM", sys.argv[1])
except RlctlError as error:
    print(error.reason.name, flush=True)
else:
    print("claimed", flush=True)
    sys.stdin.read()
    claim.release()
    print("released", flush=True)
"""


class Ready(server.Server):
    """An attached server that is always ready."""

    probe: ClassVar[str] = "/health"

    async def refuse_unready(self) -> None:
        """Raise nothing."""


class Unready(Ready):
    """An attached server that is paused."""

    async def refuse_unready(self) -> None:
        raise Reason.ILLEGAL_STATE.error("paused")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that claims the server at URL."""
    with process() as claiming:
        yield claiming
        claiming.kill()


def process(url: str = URL) -> subprocess.Popen[str]:
    claiming = subprocess.Popen(
        [sys.executable, "-c", OTHER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert claiming.stdout is not None
    return claiming


def said(claiming: subprocess.Popen[str]) -> str:
    assert claiming.stdout is not None
    return claiming.stdout.readline().strip()


async def test_a_second_stage_server_is_refused_while_the_first_one_lives(other: subprocess.Popen[str]) -> None:
    assert said(other) == "claimed"
    attaching = Ready(None, Http("vLLM", "http://localhost:7"), lambda _: None)
    with pytest.raises(RlctlError, match=rf"has another stage server \(pid {other.pid}\)") as caught:
        await attaching.start()
    assert (caught.value.reason, caught.value.field) == (Reason.OPERATION_CONFLICT, "options.url")
    Claim("vLLM", "http://127.0.0.1:8").release()
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(RlctlError, match=str(other.pid)):
        await attaching.start()
    other.kill()
    other.wait()
    await attaching.start()
    with process() as third:
        assert said(third) == "OPERATION_CONFLICT"
    await attaching.stop()
    with process() as third:
        assert said(third) == "claimed"
        assert third.stdin is not None
        third.stdin.close()
        assert said(third) == "released"


def test_the_default_port_is_the_same_place() -> None:
    assert place_id("http://host") == place_id("http://host:80") != place_id("https://host")


def test_a_claim_of_another_process_with_the_same_pid_refuses(other: subprocess.Popen[str], tmp_path: Path) -> None:
    """Containers that share the directory have processes with equal pids."""
    assert said(other) == "claimed"
    (claim,) = tmp_path.iterdir()
    (claim / "pid").write_text(str(os.getpid()))
    with pytest.raises(RlctlError, match="another stage server"):
        Claim("vLLM", URL)


async def test_a_server_that_cannot_be_attached_to_is_not_claimed() -> None:
    with pytest.raises(RlctlError, match="paused"):
        await Unready(None, Http("vLLM", URL), lambda _: None).start()
    with process() as claiming:
        assert said(claiming) == "claimed"


def test_a_claim_that_cannot_be_taken_refuses_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    claim = Claim("vLLM", URL)
    (path,) = tmp_path.iterdir()
    claim.release()
    path.symlink_to(tmp_path)
    Claim("vLLM", URL).release()
    assert "another stage server at vLLM at http://127.0.0.1:7 would not be noticed" in caplog.text
    assert path.is_symlink()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_a_server_is_gone_once_nothing_listens_at_its_addresses(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        attached = Ready(None, Http("vLLM", f"http://{name}:{listener.getsockname()[1]}"), lambda _: None)
        assert not await attached.is_gone()
    assert await attached.is_gone()


@pytest.mark.parametrize("listens", ["127.0.0.1", "127.0.0.2"])
async def test_a_server_is_gone_once_nothing_listens_at_any_of_its_addresses(
    listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name like localhost may have two addresses, and a server listens at one of them."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: str, port: int, **hints: Any) -> list[Any]:
        hosts = ["127.0.0.1", "127.0.0.2"] if host == "two.example" else [host]
        return [entry for each in hosts for entry in await resolve(each, port, **hints)]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)
    with socket.create_server((listens, 0)) as listener:
        attached = Ready(None, Http("vLLM", f"http://two.example:{listener.getsockname()[1]}"), lambda _: None)
        assert not await attached.is_gone()
    assert await attached.is_gone()
