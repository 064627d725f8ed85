"""What the local launcher gives a process, and this machine's addresses."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from children import Child

from rlctl.contract.errors import DeadlineExceeded, InvalidRequest, Reason, RlctlError
from rlctl.launch import embedded
from rlctl.launch import gateways as gateways_module
from rlctl.launch.coordinator_calls import CoordinatorCalls
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.launch.gateways import Gateways
from rlctl.launch.interface.spec import GatewaySpec
from rlctl.launch.local import child_processes, log_files
from rlctl.launch.local.child_processes import Process, stop_all, unended
from rlctl.launch.local.launcher import LocalLauncher
from rlctl.launch.local.log_files import keep_short
from rlctl.runtime.kills import KILLED_S
from rlctl.transport.auth import load_token
from rlctl.weights.group.network_interfaces import address_on, own_address

PROGRAM = """
import json, os, sys
print(json.dumps({"rlctl": "test", "cpus": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"],
                  "token": os.environ.get("RLCTL_TOKEN", ""), "file": os.environ.get("RLCTL_TOKEN_FILE", ""),
                  "insecure": "--insecure" in sys.argv}), flush=True)
sys.stdin.read()
"""

LOGS = """
import json, sys
print(json.dumps({"rlctl": "test"}), flush=True)
for line in sys.stdin:
    sys.stderr.write(line)
    sys.stderr.flush()
"""

LEAVES_A_CHILD = """
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], stdin=subprocess.DEVNULL)
print(json.dumps({"rlctl": "test", "child": child.pid}), flush=True)
sys.stdin.read()
"""


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.005)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    (tmp_path / "says.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return LocalLauncher(tmp_path, token="secret", insecure=True, module="says")


def test_a_process_that_no_kill_ends_is_waited_for_with_a_limit(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = launcher.start("a", [])
    process.announced(20)
    monkeypatch.setattr(process._popen, "kill", lambda: None)
    monkeypatch.setattr(process._popen, "terminate", lambda: None)
    began = time.monotonic()
    assert process.wait(0.1, 0.1)
    assert process.returncode is None
    monkeypatch.setattr(child_processes, "STOP_S", 0.1)
    monkeypatch.setattr(child_processes, "KILLED_S", 0.1)
    assert stop_all([process]) == [process]
    assert time.monotonic() - began < 5
    error = unended([process])
    assert error is not None
    assert f"a (pid {process.pid}) was killed and has not ended" in error.message
    os.kill(process.pid, signal.SIGKILL)
    assert not process.wait()
    assert unended([process]) is None


def test_a_signal_from_just_before_the_wait_for_an_announcement_is_handled_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python handles such a signal at the end of the wait: a wait in pieces ends soon."""
    (tmp_path / "mute.py").write_text("import sys; sys.stdin.read()")
    process = Process("a", [], tmp_path / "log", {"PYTHONPATH": str(tmp_path)}, module="mute")
    pieces: list[float | None] = []
    wait = process._announced.wait
    monkeypatch.setattr(child_processes, "WAKE_S", 0.1)
    monkeypatch.setattr(process._announced, "wait", lambda timeout: pieces.append(timeout) or wait(timeout))
    try:
        with pytest.raises(DeadlineExceeded, match="a did not come up in 1 s"):
            process.announced(1)
        assert len(pieces) > 5
        assert all(piece is not None and piece <= 0.1 for piece in pieces)
    finally:
        process.kill()
        process.wait()


def test_an_attached_stage_server_that_no_kill_ends_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_processes, "STOP_S", 0.1)
    monkeypatch.setattr(child_processes, "KILLED_S", 0.1)
    undying = Child("actor-0", [])
    monkeypatch.setattr(undying, "kill", lambda: None)
    embedded._stop([undying])
    assert "actor-0 (pid 1) was killed and has not ended" in caplog.text


def test_a_process_that_closes_its_output_and_does_not_end_is_waited_for_with_a_limit(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text("import os, sys; os.close(1); sys.stdin.read()")
    process = Process("a", [], tmp_path / "log", {"PYTHONPATH": str(tmp_path)}, module="mute")
    try:
        with pytest.raises(DeadlineExceeded, match="a did not come up in 2 s"):
            process.announced(2)
    finally:
        process.kill()
        process.wait()


def test_cores_are_a_processs_own_until_it_ends(launcher: LocalLauncher) -> None:
    cores = sorted(os.sched_getaffinity(0))
    first = launcher.start("a", [], {}, cpus=1)
    unbound = launcher.start("b", [], {"OMP_NUM_THREADS": "7"}, cpus=0)
    try:
        assert launcher._cores == {cores[0]: first}
        facts = first.announced(20)
        assert (facts["threads"], facts["token"], facts["insecure"]) == ("1", "secret", "True")
        assert os.sched_getaffinity(first.pid) == {cores[0]}
        assert unbound.announced(20)["threads"] == "7"
        assert os.sched_getaffinity(unbound.pid) == set(cores)
        with pytest.raises(InvalidRequest, match=f"{len(cores) - 1} of {len(cores)} are free"):
            launcher.start("c", [], {}, cpus=len(cores))
    finally:
        for process in (first, unbound):
            process.kill()
            process.wait()
    again = launcher.start("d", [], {}, cpus=len(cores))
    again.kill()
    again.wait()


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(("given", "counts"), [("mine", "mine"), ("", None), (None, "of the file")])
def test_a_token_that_is_given_counts_above_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, counts: str | None
) -> None:
    """Else the processes would have another one than whoever started them, and nobody could talk to them."""
    (tmp_path / "token").write_text("of the file")
    monkeypatch.setenv("RLCTL_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("RLCTL_TOKEN", "of the environment")
    process = LocalLauncher(tmp_path, token=given, module="says").start("a", [])
    try:
        facts = process.announced(20)
    finally:
        process.kill()
        process.wait()
    assert load_token({"RLCTL_TOKEN": facts["token"], "RLCTL_TOKEN_FILE": facts["file"]}) == counts


def test_a_process_has_ended_though_one_of_its_children_goes_on(tmp_path: Path, launcher: LocalLauncher) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES_A_CHILD)
    process = Process("a", [], tmp_path / "a.log", {}, "leaves")
    child = int(process.announced(20)["child"])
    try:
        started = time.monotonic()
        process.kill()
        process.wait(5)
        assert time.monotonic() - started < 10
        assert process.returncode == -signal.SIGKILL
    finally:
        os.kill(child, signal.SIGKILL)
        process.wait()


def test_a_log_that_has_become_long_begins_anew_and_the_process_goes_on(
    tmp_path: Path, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "TEND_S", 0.01)
    monkeypatch.setattr(child_processes, "keep_short", functools.partial(keep_short, at_most=1000))
    (tmp_path / "logs.py").write_text(LOGS)
    log, kept = tmp_path / "a.log", tmp_path / "a.log.1"
    log.write_text("old\n")  # of a process before
    process = Process("a", [], log, {}, "logs")
    try:
        process.announced(20)

        def logs(line: str) -> None:
            assert process._popen.stdin is not None
            process._popen.stdin.write(line.encode() + b"\n")
            process._popen.stdin.flush()

        for letter in "xy":
            logs(letter * 2000)
            wait_for(lambda letter=letter: kept.exists() and letter in kept.read_text() and not log.read_bytes())  # type: ignore[misc]
            assert process.last_log_line() == ""
            logs("the end")
            wait_for(lambda: log.read_bytes() == b"the end\n")
            assert process.last_log_line() == "the end"
        assert kept.read_text() == "the end\n" + "y" * 2000 + "\n"
    finally:
        process.kill()
        process.wait()


def test_a_log_that_cannot_be_copied_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 2000)

    def full(_log: object, kept: Path, _size: object) -> int:
        kept.write_text("x" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log_files, "_copied", full)
    keep_short(log, 1000)
    assert log.stat().st_size == 2000
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]


def test_a_log_is_cut_by_one_process_at_a_time(tmp_path: Path) -> None:
    log, kept = tmp_path / "a.log", tmp_path / "a.log.1"
    log.write_text("x" * 2000)
    kept.write_text("before")
    with log.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not keep_short(log, 1000)
    assert (log.stat().st_size, kept.read_text()) == (2000, "before")
    assert keep_short(log, 1000)
    assert (log.stat().st_size, kept.stat().st_size) == (0, 2000)


WRITER = """
import itertools, os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in itertools.count():
    os.write(log, b"%07d %s\\n" % (number, b"." * 90))
    if number % 1000 == 0 and os.path.exists(sys.argv[2]):
        break
print(number)
"""


def test_a_log_is_cut_while_it_is_written_without_the_loss_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "probe"
    probe.write_bytes(b"x" * (2 * log_files._BLOCK))
    with probe.open("r+b") as file:
        if not log_files._cut_off(file, log_files._BLOCK):
            pytest.skip("this file system cannot cut off the beginning of a file")
    emptied = []
    monkeypatch.setattr(os, "truncate", lambda *_: emptied.append(True))
    log, stop = tmp_path / "a.log", tmp_path / "stop"
    command = [sys.executable, "-c", WRITER, str(log), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        wait_for(log.exists)
        pieces = []
        while len(pieces) < 5:
            if keep_short(log, 1 << 20):
                pieces.append((tmp_path / "a.log.1").read_bytes())
        stop.touch()
        last, _ = writer.communicate(timeout=20)
    assert not emptied
    numbers = [int(line[:7]) for line in (b"".join(pieces) + log.read_bytes()).splitlines()]
    assert numbers == list(range(int(last) + 1))


def test_a_process_that_the_system_does_not_start_has_failed(
    tmp_path: Path, launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(RlctlError, match=r"a cannot be started: .*Resource temporarily unavailable") as caught:
        launcher.start("a", [])
    assert caught.value.reason is Reason.ENGINE_FAILED
    gateways = Gateways([GatewaySpec("actor", "127.0.0.1:0")], launcher, 0.0, lambda _: None)
    for _ in range(3):
        gateways.look("coordinator", restart=True)
        assert gateways.errors["actor"].reason is Reason.ENGINE_FAILED
    assert not gateways.processes
    wanted, gateways.specs = gateways.specs, ()
    gateways.look("coordinator", restart=True)
    assert gateways.settled
    gateways.specs = wanted
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gateways.look("coordinator", restart=True)
    assert not gateways.errors
    (process,) = gateways.processes
    assert process.announced(20)["token"] == "secret"
    gateways.stop()


@pytest.mark.parametrize(("listen", "waits"), [("127.0.0.1:3000", True), ("127.0.0.1:0", False)])
def test_a_gateway_that_is_changed_waits_for_the_port_of_the_one_before(listen: str, waits: bool) -> None:
    """That one ends its requests first; another one at its port would have failed, and `rlctl up` with it."""
    children: list[Child] = []

    class Launcher:
        def start(self, name: str, arguments: Sequence[str], **_: object) -> Child:
            children.append(Child(name, arguments))
            return children[-1]

    gateways = Gateways([GatewaySpec("actor", listen)], Launcher(), 0.0, lambda _: None)  # type: ignore[arg-type]
    gateways.look("c", restart=True)
    before = children[0]
    before.facts = {"address": "http://127.0.0.1:3000"}
    before.terminate = lambda: None  # type: ignore[method-assign]
    gateways.look("c", restart=True)
    assert gateways.settled
    gateways.specs = (GatewaySpec("actor", listen, "round_robin"),)
    gateways.look("c", restart=True)
    assert len(children) == (1 if waits else 2)
    assert not gateways.settled
    before.returncode = 0
    gateways.look("c", restart=True)
    assert len(children) == 2
    children[1].facts = before.facts
    gateways.look("c", restart=True)
    assert gateways.settled


def test_a_gateway_that_does_not_come_up_is_told_of_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlctl up` would wait for it for ever, without a word."""
    now, children, said = [100.0], [], []  # type: ignore[var-annotated]
    monkeypatch.setattr(gateways_module.time, "monotonic", lambda: now[0])

    class Launcher:
        def start(self, name: str, arguments: Sequence[str], **_: object) -> Child:
            children.append(Child(name, arguments))
            return children[-1]

    gateways = Gateways([GatewaySpec("actor", "127.0.0.1:0")], Launcher(), 1.0, said.append)  # type: ignore[arg-type]
    gateways.look("c", restart=True)
    children[0].last = "asking the router"
    for _ in range(40):
        now[0] += 1
        gateways.look("c", restart=True)
    assert said == [
        f"gateway-actor: still starting after {passed} s; its log says: asking the router" for passed in (10, 20, 40)
    ]
    assert not gateways.errors
    now[0] += gateways_module.START_S
    gateways.look("c", restart=True)
    assert gateways.errors["actor"].reason is Reason.DEADLINE_EXCEEDED
    assert "gateway-actor did not come up in 300 s" in gateways.errors["actor"].message
    assert children[0].returncode is not None, "it is ended"
    assert not gateways.settled
    now[0] += 1
    gateways.look("c", restart=True)
    gateways.look("c", restart=True)
    assert len(children) == 2
    assert not gateways.errors, "it has as long again"
    children[1].facts = {"address": "http://127.0.0.1:3000"}
    gateways.look("c", restart=True)
    assert gateways.settled


def test_a_gateway_that_no_kill_ends_is_looked_at_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, children = [100.0], []  # type: ignore[var-annotated]
    monkeypatch.setattr(gateways_module.time, "monotonic", lambda: now[0])

    class Launcher:
        def start(self, name: str, arguments: Sequence[str], **_: object) -> Child:
            children.append(Child(name, arguments))
            return children[-1]

    def no_wait(*_: float) -> bool:
        raise AssertionError("a wait stops the only loop of the supervisor")

    gateways = Gateways([GatewaySpec("actor", "127.0.0.1:0")], Launcher(), 1.0, lambda _: None)  # type: ignore[arg-type]
    gateways.look("c", restart=True)
    undying = children[0]
    ends, undying.kill, undying.terminate, undying.wait = undying.terminate, lambda: None, lambda: None, no_wait
    now[0] += gateways_module.START_S + 1
    for _ in range(4):
        gateways.look("c", restart=True)
        now[0] += gateways_module.LEAVE_S
    assert gateways.processes == [undying], "it may have the port"
    assert gateways.errors["actor"].reason is Reason.DEADLINE_EXCEEDED
    ends()
    undying.wait = lambda *_: False
    gateways.look("c", restart=True)
    assert gateways.processes == [children[1]]
    children[1].facts = {"address": "http://127.0.0.1:3000"}
    gateways.look("c", restart=True)
    assert gateways.settled


def test_a_removed_gateway_that_no_kill_ends_is_an_error_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the port. A change of the fleet would wait for its end."""
    now, said = [100.0], []  # type: ignore[var-annotated]
    monkeypatch.setattr(gateways_module.time, "monotonic", lambda: now[0])
    undying = Child("gateway-actor", [])

    class Launcher:
        def start(self, *_: object, **__: object) -> Child:
            return undying

    fleet = LaunchedFleet((), directory=tmp_path, on_progress=said.append)
    fleet.gateways = Gateways([GatewaySpec("actor", "127.0.0.1:0")], Launcher(), 1.0, said.append)  # type: ignore[arg-type]
    fleet.look(restart=True)
    undying.announce()
    ends, undying.kill, undying.terminate = undying.terminate, lambda: None, lambda: None
    fleet.settle()
    fleet.want(())
    changing = fleet.settling()
    for _ in range(3):
        next(changing)
        now[0] += gateways_module.LEAVE_S / 2
    now[0] += KILLED_S + 1
    with pytest.raises(RlctlError, match=r"gateway-actor \(pid 1\) was killed and has not ended") as caught:
        next(changing)
    fleet.look(restart=True)
    assert fleet.gateways.unended is caught.value, "the supervisor reports it once"
    ends()
    fleet.settle()
    assert fleet.gateways.unended is None
    assert said[-1] == "gateway-actor: stopped"


def test_a_silent_coordinator_is_called_once_a_step() -> None:
    class Silent:
        """A client without answers."""

        aio = None
        calls = 0

        @property
        def loop(self) -> Silent:
            return self

        def call(self, work: Coroutine[Any, Any, None]) -> None:
            work.close()
            self.calls += 1
            raise TimeoutError

    async def ask(_: object) -> None:
        raise AssertionError

    silent = Silent()
    calls = CoordinatorCalls(lambda: silent, lambda: None, print)  # type: ignore[arg-type, return-value]
    assert [calls.call(ask), calls.call(ask)] == [False, False]
    assert silent.calls == 1
    calls.begin_step()
    assert not calls.call(ask)
    assert silent.calls == 2, "the next step asks again"


def test_a_server_that_is_stuck_ends_some_time_after_its_parent() -> None:
    program = """
import signal, time
from rlctl.runtime import server_process
server_process.ENDS_S = 0.1
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server_process.end_with_parent()
time.sleep(60)
"""
    assert (
        subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, timeout=20, check=False).returncode
        == 1
    )


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of interfaces are asked as Linux is")
def test_an_interface_or_a_network_is_an_address_of_this_machine() -> None:
    assert address_on("lo") == "127.0.0.1"
    assert address_on("127.0.0.0/8") == "127.0.0.1"
    assert own_address("localhost") == "localhost"
    assert own_address("127.0.0.1") == own_address("[127.0.0.1]") == "127.0.0.1"
    for host in ("203.0.113.7", "[::1]:80", "127.0.0.1:80", "no such host", ""):
        with pytest.raises(RlctlError) as caught:
            own_address(host)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "host"), host
    for nowhere in ("no0", "203.0.113.0/24"):
        with pytest.raises(InvalidRequest, match=rf"no address on {nowhere}; there are: .*lo 127\.0\.0\.1"):
            address_on(nowhere)
    with pytest.raises(InvalidRequest, match=r"10\.0\.0\.0/99 is no network") as caught:
        address_on("10.0.0.0/99", field="network")
    assert caught.value.field == "network"
