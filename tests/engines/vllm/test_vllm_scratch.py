"""What a stage server that was killed leaves of its vLLM is removed when the next one is launched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rlctl_servers.options import Options
from rlctl_vllm.server.process import VLLMProcess

from rlctl.engine import EngineConfig


async def test_what_a_killed_stage_server_left_goes_at_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.symlink_to("/bin/true")
    config, options = EngineConfig("/nowhere"), Options(python=str(python))
    killed, lives = VLLMProcess(config, options), VLLMProcess(config, options)
    assert Path(killed.environment()["TMPDIR"]) == killed.scratch.path
    for each in (killed, lives):
        os.utime(each.scratch.path, (0, 0))
        assert each.inherited() == [each.scratch.lock], "while the server lives it is locked too"
    os.close(killed.scratch.lock)  # as the death of both leaves it
    following = VLLMProcess(config, options)
    assert not killed.scratch.path.exists()
    assert lives.scratch.path.exists()
    for each in (lives, following):
        await each.stop()
        assert not each.scratch.path.exists()
