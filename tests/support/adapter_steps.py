"""Checks of LoRA adapters for every server engine; outputs are the merged model's."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loras import CONFIG, SCALE, lora, merged_says, save
from models import changed

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v

PROMPT = "12+34="


def generated(fleet: Fleet, adapter: str, count: int = 8) -> tuple[list[int], set[str]]:
    """Return tokens, and versions of the adapter."""
    response = fleet.generate(encode(PROMPT), max_new_tokens=count, temperature=0.0, ignore_eos=True, adapter=adapter)
    sample = response.samples[0]
    return list(sample.output_ids), {span.adapter_version for span in sample.versions}


def listed(fleet: Fleet) -> set[tuple[str, str]]:
    """Return names and versions of the server's adapters: one answer for all ranks."""
    (stage,) = fleet.list_adapters().stage_results
    alone = len(stage.rank_results) == 1
    assert {r.evidence for r in stage.rank_results} == {common.EVIDENCE_RANK if alone else common.EVIDENCE_ENGINE}
    return {(adapter.name, adapter.version) for adapter in stage.rank_results[0].adapters.adapters}


def are_loaded_switched_and_unloaded(fleet: Fleet, model: Any, directory: Path) -> None:
    base = merged_says(model, PROMPT, {})
    assert generated(fleet, "") == (base, {""})
    one, two, other = (lora(model, seed) for seed in (1, 2, 3))
    fleet.load_adapter("math", save(directory / "one", one), version="1")
    operation = fleet.load_adapter("prose", save(directory / "other", other), version="o")
    assert {(a.name, a.version, a.lora_rank, a.scale) for a in operation.adapters} == {
        ("math", "1", 2, SCALE),
        ("prose", "o", 2, SCALE),
    }
    assert listed(fleet) == {("math", "1"), ("prose", "o")}
    wanted = merged_says(model, PROMPT, one)
    assert wanted != base
    assert generated(fleet, "math") == (wanted, {"1"})
    assert generated(fleet, "prose") == (merged_says(model, PROMPT, other), {"o"})
    # The same name, different tensors: no KV entry of the first version is used for the second.
    fleet.load_adapter("math", save(directory / "two", two), version="2")
    assert generated(fleet, "math") == (merged_says(model, PROMPT, two), {"2"})
    assert generated(fleet, "") == (base, {""})
    # Changed or deleted files of a serving adapter have no effect.
    save(directory / "two", one)
    shutil.rmtree(directory / "other")
    for _ in range(2):
        assert generated(fleet, "math") == (merged_says(model, PROMPT, two), {"2"})
        assert generated(fleet, "prose") == (merged_says(model, PROMPT, other), {"o"})
    fleet.unload_adapter("prose")
    assert listed(fleet) == {("math", "2")}
    with pytest.raises(RlctlError) as unknown:
        generated(fleet, "prose")
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND
    fleet.unload_adapter("math")


def are_refused(fleet: Fleet, model: Any, directory: Path, cases: Iterable[tuple[Reason, str]]) -> None:
    """Check that no path of ``cases`` replaces "math" or makes the server unroutable."""
    held = lora(model, 4)
    fleet.load_adapter("math", save(directory / "held", held), version="held")
    tensors = lora(model, 5)
    short = save(directory / "short", dict(list(tensors.items())[1:]))
    for reason, path in (
        *cases,
        (Reason.CHECKPOINT_MISMATCH, short),
        (Reason.CHECKPOINT_NOT_FOUND, str(directory / "nowhere")),
        (Reason.PATH_NOT_ALLOWED, "/etc"),
    ):
        with pytest.raises(RlctlError) as refused:
            fleet.load_adapter("math", path, version="bad")
        assert refused.value.reason is reason, (path, refused.value)
    assert generated(fleet, "math") == (merged_says(model, PROMPT, held), {"held"}), "as it was"
    assert all(stage.routable for stage in fleet.status().stages)
    fleet.unload_adapter("math")


def are_sent_by_a_trainer(fleet: Fleet, model: Any) -> None:
    """Check adapters from shared memory; unfit tensors, and a group, change nothing."""
    tensors: dict[str, Any] = {}
    with closing(fleet.publisher("actor", path="ipc", bucket_bytes=4096)) as publisher:
        for version in ("sent-1", "sent-2"):
            tensors = lora(model, sum(version.encode()))
            result = publisher.update(tensors.items(), version=version, adapter="sent", adapter_config=CONFIG)
            (stage,) = result.operation.stage_results
            assert stage.verified == common.VERIFICATION_LEVEL_EXPECTED
            assert generated(fleet, "sent") == (merged_says(model, PROMPT, tensors), {version})
        short = list(tensors.items())[1:]
        wide = {"config": {**CONFIG, "r": 64}, "weights": tensors.items()}
        for case in ({"config": CONFIG, "weights": short}, wide):
            with pytest.raises(RlctlError) as refused:
                publisher.update(case["weights"], version="bad", adapter="sent", adapter_config=case["config"])
            assert refused.value.reason in (Reason.WEIGHTS_INCOMPLETE, Reason.UNSUPPORTED), refused.value
            assert "64" in str(refused.value) or "tensors" in str(refused.value), refused.value
    with closing(fleet.publisher("actor", path="broadcast")) as publisher, pytest.raises(RlctlError) as refused:
        publisher.update(tensors.items(), version="bad", adapter="sent", adapter_config=CONFIG)
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "path")
    assert generated(fleet, "sent") == (merged_says(model, PROMPT, tensors), {"sent-2"}), "as it was"
    assert all(stage.routable for stage in fleet.status().stages)
    fleet.unload_adapter("sent")


def held_back(fleet: Fleet, adapter: str) -> Iterator[rollout.GenerateResponse]:
    """Return a request with an adapter, held by a pause; a request that ended before the pause is repeated."""
    for _ in range(20):
        stream = fleet.generate_stream(
            encode(PROMPT), max_new_tokens=480, temperature=0.0, ignore_eos=True, adapter=adapter
        )
        next(stream)
        fleet.pause_generation("in_place")
        (stage,) = fleet.call(v.GetLoadsRequest()).stage_results
        if any(rank.loads.running + rank.loads.waiting for rank in stage.rank_results):
            return stream
        list(stream)
        fleet.continue_generation()
    raise AssertionError("every request was over before the pause came")


def end_requests_only_when_asked_to(fleet: Fleet, model: Any, directory: Path, *, while_paused: bool) -> None:
    """``while_paused``: also requests that a pause holds."""
    path, new = save(directory / "busy", lora(model, 6)), lora(model, 7)
    save(directory / "new", new)
    fleet.load_adapter("busy", path, version="1")
    stream = held_back(fleet, "busy")

    def replace(*, abort: bool) -> None:
        fleet.load_adapter("busy", str(directory / "new"), version="2", abort_requests=abort)

    calls = [lambda: replace(abort=False), lambda: fleet.unload_adapter("busy")]
    for call in calls if while_paused else [*calls, lambda: replace(abort=True)]:
        with pytest.raises(RlctlError) as busy:
            call()
        assert busy.value.reason is Reason.ACTIVE_REQUESTS, busy.value
    if not while_paused:
        fleet.continue_generation()
    replace(abort=True)
    (last,) = list(stream)[-1].samples
    assert last.finish_reason.type == rollout.FINISH_TYPE_ABORT
    fleet.continue_generation()
    assert generated(fleet, "busy") == (merged_says(model, PROMPT, new), {"2"})
    fleet.unload_adapter("busy")


def are_kept_or_dropped(fleet: Fleet, model: Any, directory: Path) -> None:
    """Check the adapters after updates of the base that keep or drop adapters."""
    tensors = lora(model, 8)
    fleet.load_adapter("kept", save(directory / "kept", tensors), version="k")
    shutil.rmtree(directory / "kept")
    base = changed(model, seed=9)
    with closing(fleet.publisher("actor", path="ipc")) as publisher:
        updated = publisher.update(base, version="base")
        assert {stage.verified for stage in updated.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
        assert generated(fleet, "kept") == (merged_says(base, PROMPT, tensors), {"k"})
        base = changed(model, seed=10)
        base.save_pretrained(directory / "saved")
        digest = rlctl.model_digest(base)
        fleet.update_weights_from_disk(str(directory / "saved"), version="disk", expected_digest=digest)
        assert generated(fleet, "kept") == (merged_says(base, PROMPT, tensors), {"k"})
        dropped = publisher.update(model, version="without", adapters="drop")
    assert list(dropped.operation.dropped_adapters)
    assert listed(fleet) == set()
    with pytest.raises(RlctlError) as unknown:
        generated(fleet, "kept")
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND


def come_back_with(fleet: Fleet, slot: str, name: str) -> None:
    """Kill the server of a slot, and wait until it serves again with the adapter of a name."""
    (rank, *_) = fleet.call(v.GetServerInfoRequest(), slots=[slot]).stage_results[0].rank_results
    before = next(s.incarnation for s in fleet.status().stages if s.registration.slot == slot)
    os.kill(rank.server_info.pid, signal.SIGKILL)
    for event in fleet.watch():
        stages = [s for s in event.fleet.stages if s.registration.slot == slot and s.incarnation > before]
        settled = [s.report for s in stages if s.routable]
        if any(name in {a.name for a in report.adapters} and not report.update_id for report in settled):
            return


def pause_one_alone(fleet: Fleet, model: Any, directory: Path, slot: str, *, killed: bool = False) -> None:
    """Check a pause of an adapter: its requests end or finish, other requests go on; ``killed``: across a restart."""
    held, free = lora(model, 12), lora(model, 13)
    for name, tensors in (("held", held), ("free", free)):
        fleet.load_adapter(name, save(directory / name, tensors), version=name)
    for mode in ("retract", "in_place"):
        with pytest.raises(RlctlError) as unable:
            fleet.pause_generation(mode, adapter="held")
        assert (unable.value.reason, unable.value.field) == (Reason.UNSUPPORTED, "mode")
        assert slot in unable.value.message
    for mode in ("abort", "drain"):
        assert _ended_by(fleet, mode) == (rollout.FINISH_TYPE_ABORT if mode == "abort" else rollout.FINISH_TYPE_LENGTH)
        _only_is_paused(fleet, model, free)
        if mode == "abort":
            fleet.continue_generation(adapter="held")
            assert generated(fleet, "held") == (merged_says(model, PROMPT, held), {"held"})
    if killed:
        come_back_with(fleet, slot, "held")
        _only_is_paused(fleet, model, free)
    fleet.continue_generation(adapter="held")
    assert generated(fleet, "held") == (merged_says(model, PROMPT, held), {"held"})
    for name in ("held", "free"):
        fleet.unload_adapter(name)


def _ended_by(fleet: Fleet, mode: str) -> int:
    """Return how a running request with the adapter "held" ends at its pause; an earlier end repeats the request."""
    count = 160 if mode == "drain" else 480  # a drain waits for the end
    for _ in range(20):
        stream = fleet.generate_stream(
            encode(PROMPT), adapter="held", max_new_tokens=count, temperature=0.0, ignore_eos=True
        )
        next(stream)
        fleet.pause_generation(mode, adapter="held")
        (last,) = list(stream)[-1].samples
        if last.finish_reason.type == rollout.FINISH_TYPE_ABORT or mode == "drain":
            break
        fleet.continue_generation(adapter="held")
    return last.finish_reason.type


def _only_is_paused(fleet: Fleet, model: Any, free: Any) -> None:
    """Check that only the adapter "held" is paused, not "free" and the base."""
    (stage,) = fleet.status().stages
    assert [pause.adapter for pause in stage.adapter_pauses] == ["held"]
    assert generated(fleet, "free") == (merged_says(model, PROMPT, free), {"free"})
    assert generated(fleet, "") == (merged_says(model, PROMPT, {}), {""})
    with pytest.raises(RlctlError) as paused:
        fleet.generate(encode(PROMPT), adapter="held", max_new_tokens=1, timeout_s=1.0)
    assert paused.value.reason is Reason.NO_ROUTABLE_STAGE, paused.value
    assert "with adapter 'held' paused by name" in paused.value.message
