"""A forked process has the arguments, environment, streams and status of a process that starts with an interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from forking import INTERPRETERS, SERVERS, TORCH, Forked, Nursery

TELLS = """
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["COLOUR"], "torch" in sys.modules, os.getpgid(0) == os.getpid()]))
print("so much for that", file=sys.stderr)
raise SystemExit(int(sys.stdin.readline()))
"""

LAUNCHES = """
import os, subprocess, sys
from rlctl.launch.local import child_processes
command = [sys.executable, "-m", "rlctl", "stage", "--engine", "torch", "--device", "cpu", "--help"]
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": sys.stderr, "process_group": 0}
process = child_processes.subprocess.Popen(command, env=dict(os.environ), **pipes)
assert process.wait(60) == 0
print(type(process).__name__, b"--engine" in process.stdout.read())
"""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def stderr(tmp_path: Path) -> Iterator[IO[bytes]]:
    with (tmp_path / "stderr").open("w+b") as file:
        yield file


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "tells.py"
    path.write_text(TELLS)
    return str(path)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_torch_is_imported_for_the_first_process_that_needs_it(
    nursery: Nursery, script: str, stderr: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "green")
    has_torch = []
    for imported in (SERVERS, TORCH):
        process = Forked(nursery, [script], stderr, os.environ, imported)
        process.stdin.write(b"0\n")
        assert process.wait(30) == 0
        has_torch.append(json.loads(process.stdout.read())[2])
        process.close()
    assert has_torch == [False, True]


def test_it_has_its_arguments_environment_streams_and_status(
    nursery: Nursery, script: str, stderr: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "green")
    process = nursery.script([script, "a", "b"], stderr)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.stdin.write(b"7\n")
    assert (process.wait(30), process.poll()) == (7, 7)
    assert json.loads(process.stdout.read()) == [["a", "b"], "green", True, True]
    stderr.seek(0)
    assert stderr.read() == b"so much for that\n"
    process.close()


def test_it_is_killed_once_and_leaves_nothing_open(
    nursery: Nursery, script: str, stderr: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "green")
    left = []
    for _ in range(2):  # the first one may start the process that forks
        process = nursery.script([script], stderr)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        process.kill()  # nobody is hit by it
        process.close()
        left.append(open_files())
    assert left[0] == left[1]


@pytest.mark.parametrize(
    "server", [("stage", "--engine", "torch", "--device", "cpu"), ("stage", "--engine", "fake"), ("coordinator",)]
)
def test_what_is_read_by_imports_needs_an_interpreter_of_its_own(
    nursery: Nursery, stderr: IO[bytes], server: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "rlctl", *server, "--help"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr, "process_group": 0}
    same = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    forked = nursery.popen(command, env=same | {"COLOUR": "red"}, **streams)
    started = nursery.popen(command, env=same | {"OMP_NUM_THREADS": same["OMP_NUM_THREADS"] + "1"}, **streams)
    assert [isinstance(each, Forked) for each in (forked, started)] == [True, False]
    for process in (forked, started):
        assert process.wait(60) == 0
        assert b"--listen" in process.stdout.read()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize(("variable", "kind"), [("OTHER", "Forked"), (INTERPRETERS, "Popen")])
def test_launchers_in_other_processes_fork_unless_the_test_needs_interpreters(variable: str, kind: str) -> None:
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {variable: "1"}
    done = subprocess.run([sys.executable, "-c", LAUNCHES], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [kind, "True"]


def test_one_that_cannot_fork_is_told_of(tmp_path: Path, script: str, stderr: IO[bytes]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('a thread was started')")
    nursery = Nursery(str(broken))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the process that forks is gone"):
            nursery.script([script], stderr)
    nursery.close()


def test_what_it_forked_ends_with_it(script: str, stderr: IO[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "green")
    nursery = Nursery()
    process = Forked(nursery, [script], stderr, os.environ, SERVERS)
    nursery.close()
    assert process.wait(30) == -signal.SIGKILL
    process.close()
