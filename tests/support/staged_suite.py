"""Staged updates of a real server: received while requests run, swapped under a short pause.

A module imports these tests (``from staged_suite import *``), and defines the server by its fixture ``staging``.
"""

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

STAGED = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED)


def test_it_says_that_it_stages(staging: Driver) -> None:
    assert staging.info.capabilities.staged_apply


def in_place(staging: Driver, model: Any, label: str, sequence: int) -> common.WeightVersion:
    staging.prepare(label)
    with Segments(staging) as segments:
        segments.send(model, label)
    version = staging.commit(label, label, sequence)
    staging.tell(v.FlushCacheRequest())
    staging.tell(v.ContinueGenerationRequest())
    return version


def seal(staging: Driver, update_id: str) -> str:
    """Seal the shadow copies of all ranks; return their model digest."""
    ranks = len(staging.info.layout.workers)
    sealed = staging.tell(v.SealUpdateRequest(), update_id=update_id)
    assert [result.evidence for result in sealed] == [common.EVIDENCE_RANK] * ranks
    checks = [each.check for each in staging.tell(v.CheckWeightsRequest(shadow=True), update_id=update_id)]
    assert len({check.rank_digest for check in checks}) == ranks, "each holds parts of its own"
    (digest,) = {check.model_digest for check in checks}
    return str(digest)


def swap(staging: Driver, update_id: str, sequence: int) -> common.WeightVersion:
    """Pause, commit, flush and continue."""
    staging.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    version = staging.commit(update_id, update_id, sequence)
    staging.tell(v.FlushCacheRequest())
    staging.tell(v.ContinueGenerationRequest())
    return version


def generates_like(
    staging: Driver, model: Any, version: common.WeightVersion, text: str = "1+2=", count: int = 12
) -> None:
    generating = staging.begin(prompt(encode(text), count))
    (span,) = generating.result()[-1].samples[0].versions
    assert generating.tokens == greedy(model, encode(text), count)
    assert span.version == version


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = act()
    return time.perf_counter() - started, result


def test_a_request_runs_while_the_ranks_receive_and_pauses_for_the_swap_only(
    staging: Driver, tiny: tuple[Any, Path]
) -> None:
    """Requests begin and end between two buckets of the receiving call: impossible under a pause."""
    old, new = changed(tiny[0], seed=70), changed(tiny[0], seed=71)
    before = in_place(staging, old, "before", 30)
    with Source(staging, "staged") as source:
        plan = source.plan(new, bucket_bytes=50_000)
        assert len(plan) > 6
        buckets = list(source.packed(new, plan))
        started = time.perf_counter()
        staging.tell(STAGED, update_id="after")
        receiving = staging.submit(source.announce(plan), update_id="after")
        for number, data in enumerate(buckets):
            if number:
                generates_like(staging, old, before, f"{number % 10}+2=", 40)
            assert not receiving.done()
            source.group.broadcast(data)
        tensors = {result.weights.tensors for result in receiving.result(60)}
        assert tensors == {len(list(new.parameters()))}
        assert seal(staging, "after") == rlctl.model_digest(new)
        transfer_s = time.perf_counter() - started
    assert staging.digest() == rlctl.model_digest(old)
    running = staging.begin(prompt(encode("7"), 400)).started()
    pause_s, after = timed(lambda: swap(staging, "after", 31))
    assert staging.digest() == rlctl.model_digest(new)
    generates_like(staging, new, after)
    spans = running.result()[-1].samples[0].versions
    assert [span.version for span in spans] == [before, after]
    kept = spans[0].end
    assert running.tokens[kept : kept + 20] == greedy(new, encode("7") + running.tokens[:kept], 20)
    assert len(running.tokens) == 400
    assert pause_s < transfer_s / 10


def test_segments_and_a_partial_update_are_staged(staging: Driver, tiny: tuple[Any, Path]) -> None:
    old, new = changed(tiny[0], seed=72), changed(tiny[0], seed=72)
    before = in_place(staging, old, "base", 32)
    new.model.layers[1].mlp.down_proj.weight.data.mul_(2)
    request = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED, kind=v.UPDATE_KIND_PARTIAL)
    staging.tell(request, update_id="part")
    with Segments(staging) as segments:
        part = {"model.layers.1.mlp.down_proj.weight": new.model.layers[1].mlp.down_proj.weight}
        segments.send(list(part.items()), "part")
        generates_like(staging, old, before)
    assert seal(staging, "part") == rlctl.model_digest(new)
    generates_like(staging, new, swap(staging, "part", 33))


def test_a_checkpoint_is_staged(staging: Driver, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    old, new = changed(tiny[0], seed=73), changed(tiny[0], seed=74)
    before = in_place(staging, old, "loaded", 34)
    new.save_pretrained(tmp_path / "saved")
    staging.tell(STAGED, update_id="disk")
    path = staging.tell(v.GetModelInfoRequest()).model_path
    staging.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tmp_path / "saved")), update_id="disk")
    generates_like(staging, old, before)
    assert staging.tell(v.GetModelInfoRequest()).model_path == path
    assert seal(staging, "disk") == rlctl.model_digest(new)
    generates_like(staging, new, swap(staging, "disk", 35))
    assert staging.tell(v.GetModelInfoRequest()).model_path == str(tmp_path / "saved")


def test_an_abort_while_the_ranks_receive_leaves_what_serves(staging: Driver, tiny: tuple[Any, Path]) -> None:
    old, new = changed(tiny[0], seed=75), changed(tiny[0], seed=76)
    before = in_place(staging, old, "kept", 36)
    with Source(staging, "broken off") as source:
        plan = source.plan(new, bucket_bytes=100_000)
        staging.tell(STAGED, update_id="aborted")
        receiving = staging.submit(source.announce(plan), update_id="aborted")
        source.group.broadcast(next(source.packed(new, plan)))
        generates_like(staging, old, before)
        staging.admin.submit(staging.engine.interrupt("aborted")).result(30)
        staging.tell(v.AbortUpdateRequest(), update_id="aborted")
        with pytest.raises(RlctlError) as ended:
            receiving.result(30)
    assert ended.value.outcome == common.OUTCOME_REJECTED
    assert staging.digest() == rlctl.model_digest(old)
    generates_like(staging, old, before)
    assert refusal(staging, v.SealUpdateRequest(), update_id="aborted").reason is Reason.UPDATE_NOT_FOUND
    generates_like(staging, new, in_place(staging, new, "next", 37))


def test_a_swap_under_requests_and_a_seal_of_half_a_model_are_refused(staging: Driver, tiny: tuple[Any, Path]) -> None:
    old = changed(tiny[0], seed=77)
    before = in_place(staging, old, "still", 38)
    staging.tell(STAGED, update_id="half")
    error = refusal(staging, v.SealUpdateRequest(), update_id="half")
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, common.OUTCOME_REJECTED)
    with Segments(staging) as segments:
        segments.send(changed(tiny[0], seed=78), "half")
        error = refusal(staging, v.UpdateWeightsFromTensorRequest(load_format="their_loader.load"), update_id="half")
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "load_format")
    seal(staging, "half")
    running = staging.begin(prompt(encode("7"), 300)).started()
    error = refusal(staging, v.CommitUpdateRequest(), update_id="half")
    assert (error.reason, error.outcome) == (Reason.ACTIVE_REQUESTS, common.OUTCOME_REJECTED)
    staging.tell(v.AbortUpdateRequest(), update_id="half")
    assert running.result()[-1].samples[0].versions[0].version == before
    assert staging.digest() == rlctl.model_digest(old)
