"""A topology file with a model on vLLM and one on the torch engine, brought up for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_stage import changed, greedy

from rlctl.client.fleet import connect
from rlctl.demo.tiny import encode
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

Command = Callable[..., subprocess.CompletedProcess[str]]

FLEET = """
fleet: {{name: both, hf_checkpoint: {checkpoint}, num_gpus: 2, listen: "127.0.0.1:0"}}
models:
  - name: actor
    engine: vllm
    server_groups:
      - worker_type: regular
        num_gpus: 1
        overrides: {{max-model-len: 256, {override}}}
        environment: {{VLLM_CPU_KVCACHE_SPACE: "2"}}
  - name: critic
    engine: torch
    server_groups:
      - {{worker_type: regular, num_gpus: 1}}
"""


@pytest.fixture
def rlctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """The command, with a home of its own; what it brought up is taken down."""
    for name in ("STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlctl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)

    yield run
    run("down", "--name", "both")


def test_models_on_vllm_and_torch_are_placed_started_and_updated(
    rlctl: Command, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = tiny
    file = tmp_path / "both.yaml"
    file.write_text(FLEET.format(checkpoint=checkpoint, override="max_modle_len: 5"))
    wrong = rlctl("up", str(file), "--detach")
    assert wrong.returncode == 2, wrong
    assert "max_modle_len" in wrong.stderr
    assert "vLLM" in wrong.stderr
    file.write_text(FLEET.format(checkpoint=checkpoint, override="max_num_seqs: 7"))
    up = rlctl("up", str(file), "--detach", "-o", "json")
    assert up.returncode == 0, up.stderr
    told = json.loads(up.stdout)
    assert told["engines"] == {"actor-0": "ready", "critic-0": "ready"}
    with connect(told["endpoint"]) as fleet:
        (rank,) = fleet.call(v.GetServerInfoRequest(), model="actor").stage_results[0].rank_results
        info = rank.server_info
        assert info.engine == "vllm"
        assert info.settings["model_config.max_model_len"] == "256"
        assert info.settings["scheduler_config.max_num_seqs"] == "7"
        assert psutil.Process(info.pid).environ()["VLLM_CPU_KVCACHE_SPACE"] == "2"
        updated = changed(model, seed=5)
        with closing(fleet.publisher("actor")) as publisher:
            publisher.update(updated, version="new")
        for name, held, published in (("actor", updated, True), ("critic", model, False)):
            response = fleet.generate(encode("1+2="), model=name, max_new_tokens=8, temperature=0.0, ignore_eos=True)
            (sample,) = response.samples
            assert list(sample.output_ids) == greedy(held, encode("1+2="), 8)
            assert ({span.version.label for span in sample.versions} == {"new"}) == published
    assert rlctl("down", "--name", "both").returncode == 0
    assert not psutil.pid_exists(info.pid)
