"""Staged updates of a real SGLang of one rank: received while requests run, swapped under a short pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy
from server_stage import Driver, Segments, Source, prompt, refusal

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(300)

STAGED = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED)


def test_it_says_that_it_stages(driver: Driver) -> None:
    assert driver.info.capabilities.staged_apply


def in_place(driver: Driver, model: Any, label: str, sequence: int) -> common.WeightVersion:
    driver.prepare(label)
    with Segments(driver) as segments:
        segments.send(model, label)
    version = driver.commit(label, label, sequence)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    return version


def seal(driver: Driver, update_id: str) -> str:
    """Seal a shadow copy; its digest."""
    (result,) = driver.tell(v.SealUpdateRequest(), update_id=update_id)
    assert result.evidence == common.EVIDENCE_RANK
    (result,) = driver.tell(v.CheckWeightsRequest(shadow=True), update_id=update_id)
    return str(result.check.model_digest)


def swap(driver: Driver, update_id: str, sequence: int) -> common.WeightVersion:
    """Pause, commit, flush and continue."""
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    version = driver.commit(update_id, update_id, sequence)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    return version


def generates_like(driver: Driver, model: Any, version: common.WeightVersion, text: str = "1+2=") -> None:
    generating = driver.begin(prompt(encode(text), 12))
    (span,) = generating.result()[-1].samples[0].versions
    assert generating.tokens == greedy(model, encode(text), 12)
    assert span.version == version


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result


def test_a_request_runs_while_the_ranks_receive_and_pauses_for_the_swap_only(
    driver: Driver, tiny: tuple[Any, Path]
) -> None:
    """The call that receives is under way, half of its buckets have come, and requests begin and end."""
    old, new = changed(tiny[0], seed=70), changed(tiny[0], seed=71)
    before = in_place(driver, old, "before", 30)
    with Source(driver, "staged") as source:
        plan = source.plan(new, bucket_bytes=100_000)
        assert len(plan) > 6
        buckets = list(source.packed(new, plan))
        started = time.perf_counter()
        driver.tell(STAGED, update_id="after")
        receiving = driver.submit(source.announce(plan), update_id="after")
        for number, data in enumerate(buckets):
            if number:
                generates_like(driver, old, before, f"{number % 10}+2=")
            assert not receiving.done()
            source.group.broadcast(data)
        (result,) = receiving.result(60)
        assert result.weights.tensors == len(list(new.parameters()))
        assert seal(driver, "after") == rlctl.model_digest(new)
        transfer_s = time.perf_counter() - started
    assert driver.digest() == rlctl.model_digest(old)
    running = driver.begin(prompt(encode("7"), 400)).started()
    pause_s, after = timed(lambda: swap(driver, "after", 31))
    assert driver.digest() == rlctl.model_digest(new)
    generates_like(driver, new, after)
    spans = running.result()[-1].samples[0].versions
    assert [span.version for span in spans] == [before, after]
    kept = spans[0].end
    assert running.tokens[kept : kept + 20] == greedy(new, encode("7") + running.tokens[:kept], 20)
    assert len(running.tokens) == 400
    assert pause_s < transfer_s / 10


def test_segments_and_a_partial_update_are_staged(driver: Driver, tiny: tuple[Any, Path]) -> None:
    old, new = changed(tiny[0], seed=72), changed(tiny[0], seed=72)
    before = in_place(driver, old, "base", 32)
    new.model.layers[1].mlp.down_proj.weight.data.mul_(2)
    request = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED, kind=v.UPDATE_KIND_PARTIAL)
    driver.tell(request, update_id="part")
    with Segments(driver) as segments:
        part = {"model.layers.1.mlp.down_proj.weight": new.model.layers[1].mlp.down_proj.weight}
        segments.send(list(part.items()), "part")
        generates_like(driver, old, before)
    assert seal(driver, "part") == rlctl.model_digest(new)
    generates_like(driver, new, swap(driver, "part", 33))


def test_a_checkpoint_is_staged(driver: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    old, new = changed(tiny[0], seed=73), changed(tiny[0], seed=74)
    before = in_place(driver, old, "loaded", 34)
    new.save_pretrained(tmp_path / "saved")
    driver.tell(STAGED, update_id="disk")
    path = driver.tell(v.GetModelInfoRequest()).model_path
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tmp_path / "saved")), update_id="disk")
    generates_like(driver, old, before)
    assert driver.tell(v.GetModelInfoRequest()).model_path == path
    assert seal(driver, "disk") == rlctl.model_digest(new)
    generates_like(driver, new, swap(driver, "disk", 35))
    assert driver.tell(v.GetModelInfoRequest()).model_path == str(tmp_path / "saved")


def test_an_abort_while_the_ranks_receive_leaves_what_serves(driver: Driver, tiny: tuple[Any, Path]) -> None:
    old, new = changed(tiny[0], seed=75), changed(tiny[0], seed=76)
    before = in_place(driver, old, "kept", 36)
    with Source(driver, "broken off") as source:
        plan = source.plan(new, bucket_bytes=100_000)
        driver.tell(STAGED, update_id="aborted")
        receiving = driver.submit(source.announce(plan), update_id="aborted")
        source.group.broadcast(next(source.packed(new, plan)))
        generates_like(driver, old, before)
        driver.admin.submit(driver.engine.interrupt("aborted")).result(30)
        driver.tell(v.AbortUpdateRequest(), update_id="aborted")
        with pytest.raises(RlctlError) as ended:
            receiving.result(30)
    assert ended.value.outcome == common.OUTCOME_REJECTED
    assert driver.digest() == rlctl.model_digest(old)
    generates_like(driver, old, before)
    assert refusal(driver, v.SealUpdateRequest(), update_id="aborted").reason is Reason.UPDATE_NOT_FOUND
    generates_like(driver, new, in_place(driver, new, "next", 37))


def test_a_swap_under_requests_and_a_seal_of_half_a_model_are_refused(driver: Driver, tiny: tuple[Any, Path]) -> None:
    old = changed(tiny[0], seed=77)
    before = in_place(driver, old, "still", 38)
    driver.tell(STAGED, update_id="half")
    error = refusal(driver, v.SealUpdateRequest(), update_id="half")
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, common.OUTCOME_REJECTED)
    with Segments(driver) as segments:
        segments.send(changed(tiny[0], seed=78), "half")
        error = refusal(driver, v.UpdateWeightsFromTensorRequest(load_format="their_loader.load"), update_id="half")
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "load_format")
    seal(driver, "half")
    running = driver.begin(prompt(encode("7"), 300)).started()
    error = refusal(driver, v.CommitUpdateRequest(), update_id="half")
    assert (error.reason, error.outcome) == (Reason.ACTIVE_REQUESTS, common.OUTCOME_REJECTED)
    driver.tell(v.AbortUpdateRequest(), update_id="half")
    assert running.result()[-1].samples[0].versions[0].version == before
    assert driver.digest() == rlctl.model_digest(old)
