"""``rlctl coordinator --web``: a process with its page."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rlctl.cli.commands.serve import refuse_without_aiohttp
from rlctl.contract.errors import Reason, RlctlError


def test_a_coordinator_announces_its_page_and_ends_with_it(tmp_path: Path) -> None:
    options = ("--journal", str(tmp_path / "journal.db"), "--web", "127.0.0.1:0")
    command = [sys.executable, "-m", "rlctl", "coordinator", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            facts = json.loads(process.stdout.readline())
            with urllib.request.urlopen(facts["web_address"], timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/html")
        finally:
            process.terminate()
        assert process.wait(20) == 0


def test_the_page_is_refused_where_its_library_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_without_aiohttp()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RlctlError) as refused:
        refuse_without_aiohttp()
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.next_step == "pip install 'rlctl[web]'"
