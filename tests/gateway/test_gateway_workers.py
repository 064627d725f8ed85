"""Gateway processes that share a port: what becomes of one that goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

CODE = """
from rlctl.gateway.prefork import Workers

def work(ready, number):
    raise ValueError("the cause")

raise SystemExit(Workers(1, work).run(lambda: None, end_with_parent=False))
"""


def test_one_that_fails_says_why() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ValueError: the cause" in ended.stderr


STOPPED = """
import os, signal, sys, time
from rlctl.gateway.prefork import Workers

class Told(Workers):
    # SIGTERM comes before or after the first worker is known, and before the others are forked.

    def _fork(self):
        super()._fork()
        if len(self._began) == 1 and sys.argv[1] == "after":
            os.kill(os.getpid(), signal.SIGTERM)

def fork(fork=os.fork):
    parent, pid = os.getpid(), fork()
    if pid and sys.argv[1] == "before":
        os.kill(parent, signal.SIGTERM)
    return pid

os.fork = fork
raise SystemExit(Told(3, lambda ready, number: time.sleep(60)).run(lambda: None, end_with_parent=False))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_stopped_while_it_forks_leaves_none_running(when: str) -> None:
    subprocess.run([sys.executable, "-c", STOPPED, when], timeout=20, check=False)


STUCK = """
import os, signal, sys, time
from rlctl.gateway import prefork

def work(ready, number):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    time.sleep(600)

def kill(pid, number, kill=os.kill):
    if sys.argv[1] == "killable" or number != signal.SIGKILL:
        kill(pid, number)

if sys.argv[1] == "stuck":
    prefork.KILLED_S = 0.2
os.kill = kill
workers = prefork.Workers(2, work, ends_s=0.2)
code = workers.run(lambda: kill(os.getpid(), signal.SIGTERM), end_with_parent=False)
print(*workers._began)
raise SystemExit(code)
"""
"""Processes that do not react to SIGTERM, and to SIGKILL only where they are killable."""


def test_one_that_does_not_end_is_killed() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK, "killable"], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, [], "")


def test_those_that_no_kill_ends_are_named_and_not_waited_for() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, "stuck"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        said, pids = parent.stderr.readline(), parent.stdout.readline().split()
        code = parent.wait(20)
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
    assert (code, len(pids)) == (1, 2)
    assert "were killed and have not ended" in said
    assert all(f"(pid {pid})" in said for pid in pids)
