"""A real vLLM that somebody else has started, without rlctl's extension: attached to, and what it cannot do is said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy
from rlctl_servers.server.http import Http
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver, prompt, refusal
from up_helpers import known, own_state, rlctl_command, when

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import connect
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def url(elsewhere: str, tiny: tuple[Any, Path]) -> Iterator[str]:
    """Its NCCL engine needs a GPU, so rlctl does not use it here."""
    yield elsewhere
    as_started(elsewhere, tiny[1])


def call(url: str, path: str, body: dict[str, Any] | None = None) -> None:
    """What somebody else tells it."""

    async def tell() -> None:
        http = Http("vLLM", url)
        assert (await http.call(path, body or {}, timeout_s=30)).ok
        await http.close()

    asyncio.run(tell())


def test_a_trainer_takes_charge_of_it_by_its_url(url: str, tiny: tuple[Any, Path]) -> None:
    with rlctl.embedded([url]) as fleet:
        (stage,) = fleet.status().stages
        assert (stage.registration.slot, stage.routable) == ("actor-0", True)
        (sample,) = fleet.generate(encode("4"), max_new_tokens=8, temperature=0).samples
        assert list(sample.output_ids) == greedy(tiny[0], encode("4"), 8)
    call(url, "/resume")


def test_up_attaches_to_it_and_never_ends_it(
    url: str, tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "external.yaml"
    group = {"worker_type": "regular", "external": [url.removeprefix("http://")]}
    models = [{"name": "actor", "engine": "vllm", "server_groups": [group]}]
    fleet = {"name": "external", "listen": "127.0.0.1:0", "hf_checkpoint": str(tiny[1])}
    file.write_text(json.dumps({"fleet": fleet, "models": models}))
    with own_state(monkeypatch, tmp_path):
        up = rlctl_command("up", str(file), "--detach")
        assert up.returncode == 0, up.stderr
        assert f"(engine vllm at {url}, TP 1)" in up.stderr
        with connect(known("external").endpoint) as client:
            answer = client.generate(encode("4"), model="actor", max_new_tokens=8, temperature=0)
            (sample,) = answer.samples
            assert list(sample.output_ids) == greedy(tiny[0], encode("4"), 8)
            # The stage server is ours, and is started again; the server is not.
            before = known("external").processes["actor-0"]
            os.kill(before, signal.SIGKILL)
            when(client, lambda now: now["actor-0"].incarnation == 2 and now["actor-0"].routable)
        assert rlctl_command("down", "--name", "external").returncode == 0
    call(url, "/resume")


def test_attaching(url: str, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    options = {"url": url, "allowed_roots": str(tmp_path)}
    call(url, "/pause?mode=keep")
    paused = Driver(VLLMEngine, tiny[1], options=options)
    with pytest.raises(RlctlError) as refused:
        paused.start()
    paused.stop()
    assert (refused.value.reason, refused.value.field) == (Reason.ILLEGAL_STATE, "options.url")
    call(url, "/resume")
    driver = Driver(VLLMEngine, tiny[1], options=options)
    try:
        info = driver.start()
        assert not info.fenced
        assert not driver.engine.can_restart()
        assert list(info.capabilities.transports) == [common.TRANSPORT_DISK]
        assert not info.model_digest
        why = refusal(driver, v.UpdateWeightsFromDistributedRequest(), update_id="u")
        assert (why.reason, why.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
        assert "--worker-extension-cls" in why.message
        assert refusal(driver, v.CheckWeightsRequest()).outcome == common.OUTCOME_SKIPPED
        model = changed(tiny[0], seed=1)
        model.save_pretrained(tmp_path / "saved")
        driver.prepare("u")
        request = v.UpdateWeightsFromDiskRequest(
            model_path=str(tmp_path / "saved"), expected_digest=rlctl.model_digest(model)
        )
        driver.tell(request, update_id="u")
        version = driver.commit("u", "from-disk", 2)
        driver.tell(v.ContinueGenerationRequest())
        generating = driver.begin(prompt(encode("4"), 8))
        last = generating.result()[-1].samples[0]
        assert generating.tokens == greedy(model, encode("4"), 8)
        assert last.versions[0].version == version
    finally:
        driver.stop()
    call(url, "/resume")  # it was not ours to end


def as_started(url: str, checkpoint: Path) -> None:
    """Load a checkpoint under the label that vLLM has at its start."""
    call(url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
    call(url, "/update_weight_version", {"new_version": "default"})


def test_weights_that_somebody_else_has_put_under_the_first_label_are_not_taken_for_the_checkpoints(
    url: str, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    changed(tiny[0], seed=1).save_pretrained(tmp_path / "other")
    as_started(url, tmp_path / "other")
    driver = Driver(VLLMEngine, tiny[1], options={"url": url})
    with pytest.raises(RlctlError) as refused:
        driver.start()
    driver.stop()
    assert (refused.value.reason, refused.value.field) == (Reason.ENGINE_FAILED, "options.url")
    assert "its weights were not the checkpoint's" in refused.value.message
    as_started(url, tiny[1])


def test_weights_that_an_update_has_left_are_not_taken_for_those_of_the_start(
    url: str, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """The stage server ends before its update does; vLLM, which it was attached to, does not."""
    as_started(url, tiny[1])
    options = {"url": url, "allowed_roots": f"{tmp_path}:{tiny[1].parent}"}
    changed(tiny[0], seed=2).save_pretrained(tmp_path / "saved")
    first = Driver(VLLMEngine, tiny[1], options=options)
    try:
        assert first.start().checkpoint == str(tiny[1])
        first.prepare("u")
        first.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tmp_path / "saved")), update_id="u")
    finally:
        first.stop()
    call(url, "/resume")  # which is what the next stage server asks for
    again = Driver(VLLMEngine, tiny[1], options=options)
    try:
        assert again.start().checkpoint == ""
        again.prepare("back")
        again.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="back")
        again.commit("back", "back", 3)
        again.tell(v.ContinueGenerationRequest())
    finally:
        again.stop()
    call(url, "/resume")
