"""Gateway processes that share a port: what becomes of one that goes wrong."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from rlctl.gateway.workers import Workers

def work(ready):
    raise ValueError("the cause")

raise SystemExit(Workers(1, work).run(lambda: None, end_with_parent=False))
"""


def test_one_that_fails_says_why() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ValueError: the cause" in ended.stderr
