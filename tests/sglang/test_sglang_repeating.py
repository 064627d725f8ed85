"""Loads of a real SGLang whose weights are not read back: the trial at the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models import changed
from rlctl_servers.server.server_info import WRITES
from rlctl_sglang import SGLangEngine
from server_stage import Driver, prompt, refusal

from rlctl.contract.errors import Reason
from rlctl.demo.tiny import encode
from rlctl.engine import EngineInfo
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

FORGETFUL = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    place = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"

    def load(original, self, *arguments, **named):
        told = original(self, *arguments, **named)
        self.get_model().model.norm.weight.data.mul_(1.5)
        return told

    HookRegistry.register(place, load, HookType.AROUND)
"""
"""A plug-in of SGLang's: a load from disk leaves a step of the first load out."""


class Unread(SGLangEngine):
    """Its server holds the weights in another dtype than the checkpoint does, so the digest cannot be had."""

    def __init__(self, config: Any, on_failure: Any) -> None:
        super().__init__(dataclasses.replace(config, dtype="bfloat16"), on_failure)


def started(driver: Driver, starts: int = 1) -> EngineInfo:
    info = driver.start(starts)
    assert not info.model_digest, "it cannot be read back"
    assert common.VERIFICATION_LEVEL_EXPECTED not in info.capabilities.verification
    return info


def scores(driver: Driver) -> list[float]:
    request = v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE)
    request.prompts.add(token_ids=encode("1+2=3"))
    return list(driver.tell(request).probed[0].logprobs)


def test_a_server_whose_loads_repeat_takes_updates(sglang: str, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    driver = Driver(Unread, tiny[1], options={"allowed_roots": str(tmp_path)})
    try:
        info = started(driver)
        assert info.checkpoint == str(tiny[1])
        assert not set(WRITES) & info.capabilities.unsupported.keys()
        driver.generate(prompt(encode("4"), 6))  # at a version that rlctl knows
        before = scores(driver)
        model = changed(tiny[0], seed=4)
        model.save_pretrained(tmp_path / "saved")
        for update, path in (("new", tmp_path / "saved"), ("old", tiny[1])):
            driver.prepare(update)
            driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(path)), update_id=update)
            driver.commit(update, update, 2)
            driver.tell(v.FlushCacheRequest())
            driver.tell(v.ContinueGenerationRequest())
            assert (scores(driver) == before) is (update == "old")
    finally:
        driver.stop()


def test_a_server_whose_loads_do_not_repeat_serves_its_checkpoint_and_takes_no_updates(
    sglang: str, tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "forgetful-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nforgetful = forgetful:register\n")
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    driver = Driver(Unread, tiny[1])
    try:
        info = started(driver, starts=2)
        assert info.checkpoint == str(tiny[1])
        with torch.no_grad():
            logits = tiny[0](input_ids=torch.tensor([encode("1+2=3")])).logits[0, :-1]
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(encode("1+2=3")[1:])[:, None])[:, 0]
        assert scores(driver) == pytest.approx(wanted.tolist(), abs=0.1), "bfloat16 rounds; the spoilt norm is far off"
        for verb in WRITES:
            assert "a second load of the checkpoint" in info.capabilities.unsupported[verb]
        driver.prepare("u")
        error = refusal(driver, v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="u")
        assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        driver.tell(v.ContinueGenerationRequest())
        driver.generate(prompt(encode("4"), 6))
        assert not driver.failures
    finally:
        driver.stop()
