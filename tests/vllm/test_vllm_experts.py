"""A mixture of experts on a real vLLM: weights that are not read back, and whose packing vLLM does once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import changed, mixture_of_experts
from plain_server import plain_server
from rlctl_servers.server.server_info import WRITES
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver, Segments, Source, refusal

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(600)
_numbers = itertools.count(1)

PROMPTS = [encode("1+2=3+4=7+5=12"), encode("9+8=17")]

UNPACKED = """
def register():
    from rlctl_vllm.worker import model

    model.repack_on_reload = lambda *arguments: None
"""
"""A plug-in of vLLM's: rlctl leaves out what vLLM leaves out."""


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A mixture of experts and the checkpoint that it was saved to."""
    model = mixture_of_experts()
    directory = tmp_path_factory.mktemp("experts") / "checkpoint"
    tiny.save(model, directory)
    return model, directory


@pytest.fixture(scope="module")
def driver(vllm: str, experts: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    driver = Driver(VLLMEngine, experts[1], options={"allowed_roots": str(tmp_path_factory.getbasetemp())})
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


def computes(driver: Driver, model: Any) -> None:
    """Its log probabilities are the trainer's."""
    driver.tell(v.FlushCacheRequest())
    request = v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE)
    for ids in PROMPTS:
        request.prompts.add(token_ids=ids)
    for ids, probed in zip(PROMPTS, driver.tell(request).probed, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0]
        wanted = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert list(probed.logprobs) == pytest.approx(wanted.tolist(), abs=1e-4)


def send(driver: Driver, model: Any, path: str, directory: Path) -> None:
    """A whole update."""
    update = f"{path}-{next(_numbers)}"
    if path == "disk":
        model.save_pretrained(directory / "saved")
        driver.prepare(update)
        driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(directory / "saved")), update_id=update)
    elif path == "gloo":
        with Source(driver, update) as source:
            plan = source.plan(model)
            driver.prepare(update)
            receiving = driver.submit(source.announce(plan), update_id=update)
            source.send(model, plan)
            receiving.result(60)
    else:
        with Segments(driver) as trainer:
            driver.prepare(update)
            trainer.send(model, update)
    driver.commit(update, update, next(_numbers))
    driver.tell(v.ContinueGenerationRequest())


@pytest.mark.parametrize("path", ["disk", "gloo", "segments"])
def test_every_load_after_the_first_computes_what_the_trainer_does(
    driver: Driver, experts: tuple[Any, Path], tmp_path: Path, path: str
) -> None:
    assert common.VERIFICATION_LEVEL_RECEIVED in driver.info.capabilities.verification
    assert not driver.info.model_digest, "it cannot be read back"
    other = changed(experts[0], seed=5)
    for model in (experts[0], other, experts[0]):
        send(driver, model, path, tmp_path)
        computes(driver, model)


@pytest.mark.long
def test_loads_that_do_not_repeat_are_refused_and_the_checkpoint_is_served(
    vllm: str, experts: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "unpacked-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: unpacked\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nunpacked = unpacked:register\n")
    (tmp_path / "unpacked.py").write_text(UNPACKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    driver = Driver(VLLMEngine, experts[1])
    try:
        info = driver.start(starts=2)
        assert info.checkpoint == str(experts[1])
        assert common.VERIFICATION_LEVEL_RECEIVED not in info.capabilities.verification
        for verb in WRITES:
            assert "a second load of the checkpoint" in info.capabilities.unsupported[verb]
        computes(driver, experts[0])
        driver.prepare("u")
        error = refusal(driver, v.UpdateWeightsFromDiskRequest(model_path=str(experts[1])), update_id="u")
        assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        driver.tell(v.ContinueGenerationRequest())
        computes(driver, experts[0])
        assert not driver.failures
    finally:
        driver.stop()


def test_a_server_of_somebody_else_that_does_not_repeat_a_load_is_refused(vllm: str, experts: tuple[Any, Path]) -> None:
    with plain_server(experts[1]) as url:
        for cause in ("a second load of the checkpoint", "an earlier trial"):
            driver = Driver(VLLMEngine, experts[1], options={"url": url})
            try:
                with pytest.raises(RlctlError) as refused:
                    driver.start()
            finally:
                driver.stop()
            assert (refused.value.reason, refused.value.field) == (Reason.ENGINE_FAILED, "options.url")
            assert cause in refused.value.message
            assert "Start the server again" in refused.value.next_step


@pytest.mark.long
def test_weights_that_were_made_up_are_no_version_and_bytes_prove_no_load_of_them(
    vllm: str, experts: tuple[Any, Path], tmp_path: Path
) -> None:
    driver = Driver(VLLMEngine, experts[1], options={"load_format": "dummy"})
    try:
        info = driver.start()
        assert (info.checkpoint, info.model_digest) == ("", "")
        assert set(info.capabilities.verification) == {common.VERIFICATION_LEVEL_NONE, common.VERIFICATION_LEVEL_PROBE}
        assert "safetensors files" in info.capabilities.unsupported["verify=received"]
        assert "--load-format dummy" in info.capabilities.unsupported["UpdateWeightsFromDisk"]
        send(driver, experts[0], "gloo", tmp_path)
        computes(driver, experts[0])
    finally:
        driver.stop()
