"""A topology file with a model on vLLM: what is wrong in it, and the engine in an actor on a Ray cluster.

An engine of the same settings on this machine is that of test_vllm_adapters.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import ray_cluster
from up_helpers import known, own_state, rlctl_command
from vllm_file import NAME, START_S, check_is_as_written, written

from rlctl.sdk.blocking import connect

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_an_argument_that_vllm_does_not_have_is_refused_before_anything_starts(
    tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_state(monkeypatch, tmp_path):
        wrong = rlctl_command("up", written(tmp_path, tiny[1], max_modle_len=5), "--detach")
    assert wrong.returncode == 2, wrong
    assert "max_modle_len" in wrong.stderr
    assert "vLLM" in wrong.stderr


def test_a_setting_that_rules_out_updates_is_refused_before_anything_starts(
    tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_state(monkeypatch, tmp_path):
        for command, code in (("validate", 2), ("up", 1)):
            wrong = rlctl_command(command, written(tmp_path, tiny[1], enable_eplb="true"))
            assert wrong.returncode == code, wrong
            assert "enable_eplb moves or copies experts" in wrong.stdout + wrong.stderr


@pytest.mark.long
def test_the_engine_is_an_actors_on_a_ray_cluster(
    tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_state(monkeypatch, tmp_path), ray_cluster(tmp_path, 4) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        file = written(tmp_path, tiny[1], allowed_roots=str(tmp_path))
        how = ("--launcher", "ray", "--listen", "127.0.0.2:0", "--detach", "-o", "json")
        up = rlctl_command("up", file, *how, timeout_s=START_S)
        assert up.returncode == 0, up.stderr
        with connect(json.loads(up.stdout)["endpoint"]) as fleet:
            server = psutil.Process(check_is_as_written(fleet, tiny[0]))
        stage = psutil.Process(known(NAME).processes["actor-0"])
        assert server.ppid() == stage.pid
        keeper = stage.parent()
        assert keeper is not None
        assert "ray::" in " ".join(keeper.cmdline())
        assert rlctl_command("down", "--name", NAME).returncode == 0
        assert psutil.wait_procs([server, stage], timeout=60)[1] == []
