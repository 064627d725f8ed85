"""Gateway processes that share a port: what becomes of one that goes wrong."""

from __future__ import annotations

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
