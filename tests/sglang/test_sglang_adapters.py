"""LoRA adapters on a real SGLang of two ranks: loaded, switched, unloaded, healed; outputs are the merged model's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from loras import CONFIG, lora, merged_says, save
from server_stage import changed

import rlctl
from rlctl.client.fleet import Fleet
from rlctl.demo.tiny import encode
from rlctl.errors import Reason, RlctlError
from rlctl.launch.local import EngineSpec, LocalFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PROMPT = "12+34="
OPTIONS = {
    "enable_lora": "true",
    "lora_backend": "torch_native",
    "max_lora_rank": "4",
    "lora_target_modules": '["q_proj", "k_proj", "v_proj", "down_proj"]',
    "max_loras_per_batch": "4",
    "max_loaded_loras": "4",
}


@pytest.fixture(scope="module")
def fleet(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = {**OPTIONS, "allowed_roots": str(tmp_path_factory.getbasetemp())}
    spec = EngineSpec("actor", str(tiny[1]), engine="sglang", tp_size=2, options=options)
    with LocalFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
        yield fleet


def generated(fleet: Fleet, adapter: str, count: int = 8) -> tuple[list[int], set[str]]:
    """Tokens, and versions of the adapter."""
    response = fleet.generate(encode(PROMPT), max_new_tokens=count, temperature=0.0, ignore_eos=True, adapter=adapter)
    sample = response.samples[0]
    return list(sample.output_ids), {span.adapter_version for span in sample.versions}


def listed(fleet: Fleet) -> set[tuple[str, str]]:
    """Names and versions that the server is said to hold: one answer for all ranks."""
    (stage,) = fleet.list_adapters().stage_results
    assert {rank.evidence for rank in stage.rank_results} == {common.EVIDENCE_ENGINE}
    return {(adapter.name, adapter.version) for adapter in stage.rank_results[0].adapters.adapters}


def test_adapters_are_loaded_switched_and_unloaded(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    base = merged_says(tiny[0], PROMPT, {})
    assert generated(fleet, "") == (base, {""})
    one, two, other = (lora(tiny[0], seed) for seed in (1, 2, 3))
    fleet.load_adapter("math", save(tmp_path / "one", one), version="1")
    operation = fleet.load_adapter("prose", save(tmp_path / "other", other), version="o")
    assert {(a.name, a.version, a.lora_rank) for a in operation.adapters} == {("math", "1", 2), ("prose", "o", 2)}
    assert listed(fleet) == {("math", "1"), ("prose", "o")}
    wanted = merged_says(tiny[0], PROMPT, one)
    assert wanted != base
    assert generated(fleet, "math") == (wanted, {"1"})
    assert generated(fleet, "prose") == (merged_says(tiny[0], PROMPT, other), {"o"})
    # The same name, other tensors: none of the KV entries of the first version is used for the second.
    fleet.load_adapter("math", save(tmp_path / "two", two), version="2")
    assert generated(fleet, "math") == (merged_says(tiny[0], PROMPT, two), {"2"})
    assert generated(fleet, "") == (base, {""})
    # Files that change under an adapter that serves change nothing.
    save(tmp_path / "two", one)
    assert generated(fleet, "math") == (merged_says(tiny[0], PROMPT, two), {"2"})
    fleet.unload_adapter("prose")
    assert listed(fleet) == {("math", "2")}
    with pytest.raises(RlctlError) as unknown:
        generated(fleet, "prose")
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND
    fleet.unload_adapter("math")


def test_what_does_not_fit_changes_nothing(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    held = lora(tiny[0], 4)
    fleet.load_adapter("math", save(tmp_path / "held", held), version="held")
    tensors = lora(tiny[0], 5)
    wide = {name: t.repeat(*((4, 1) if "lora_A" in name else (1, 4))) for name, t in tensors.items()}
    elsewhere = lora(tiny[0], 5, ["gate_proj"])
    alone = lora(tiny[0], 5, ["q_proj"])
    for reason, path in (
        (Reason.CHECKPOINT_MISMATCH, save(tmp_path / "short", dict(list(tensors.items())[1:]))),
        (Reason.UNSUPPORTED, save(tmp_path / "wide", wide, r=8)),
        (Reason.UNSUPPORTED, save(tmp_path / "root", tensors, use_rslora=True)),
        (Reason.UNSUPPORTED, save(tmp_path / "layers", elsewhere, target_modules=["gate_proj"])),
        (Reason.UNSUPPORTED, save(tmp_path / "parts", alone, target_modules=["q_proj"])),
        (Reason.CHECKPOINT_NOT_FOUND, str(tmp_path / "nowhere")),
        (Reason.PATH_NOT_ALLOWED, "/etc"),
    ):
        with pytest.raises(RlctlError) as refused:
            fleet.load_adapter("math", path, version="bad")
        assert refused.value.reason is reason, (path, refused.value)
    with closing(fleet.publisher("actor", path="ipc")) as publisher, pytest.raises(RlctlError) as refused:
        publisher.update(tensors.items(), version="sent", adapter="math", adapter_config=CONFIG)
    assert refused.value.reason is Reason.UNSUPPORTED
    for number in range(3):
        fleet.load_adapter(f"more-{number}", save(tmp_path / "more", tensors), version="m")
    with pytest.raises(RlctlError) as full:
        fleet.load_adapter("one-too-many", save(tmp_path / "more", tensors), version="m")
    assert full.value.reason is Reason.UNSUPPORTED
    assert "--max-loaded-loras" in full.value.message
    for number in range(3):
        fleet.unload_adapter(f"more-{number}")
    assert generated(fleet, "math") == (merged_says(tiny[0], PROMPT, held), {"held"}), "as it was"
    assert all(stage.routable for stage in fleet.status().stages)
    fleet.unload_adapter("math")


def test_requests_with_an_adapter_are_ended_only_when_that_is_asked_for(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    path = save(tmp_path / "busy", lora(tiny[0], 6))
    fleet.load_adapter("busy", path, version="1")
    stream = fleet.generate_stream(encode(PROMPT), max_new_tokens=400, temperature=0.0, ignore_eos=True, adapter="busy")
    next(stream)
    for call in (lambda: fleet.load_adapter("busy", path, version="2"), lambda: fleet.unload_adapter("busy")):
        with pytest.raises(RlctlError) as busy:
            call()
        assert busy.value.reason is Reason.ACTIVE_REQUESTS, busy.value
    new = lora(tiny[0], 7)
    fleet.load_adapter("busy", save(tmp_path / "new", new), version="2", abort_requests=True)
    (last,) = list(stream)[-1].samples
    assert last.finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert generated(fleet, "busy") == (merged_says(tiny[0], PROMPT, new), {"2"})
    fleet.unload_adapter("busy")


def test_a_base_update_keeps_or_drops_them_and_a_killed_server_gets_them_again(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    tensors = lora(tiny[0], 8)
    fleet.load_adapter("kept", save(tmp_path / "kept", tensors), version="k")
    model = changed(tiny[0], seed=9)
    with closing(fleet.publisher("actor", path="ipc")) as publisher:
        updated = publisher.update(model, version="base")
        assert {stage.verified for stage in updated.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
        assert generated(fleet, "kept") == (merged_says(model, PROMPT, tensors), {"k"})
        model.save_pretrained(tmp_path / "saved")
        digest = rlctl.model_digest(model)
        fleet.update_weights_from_disk(str(tmp_path / "saved"), version="disk", expected_digest=digest)
        (rank, *_) = fleet.call(v.GetServerInfoRequest()).stage_results[0].rank_results
        before = fleet.status().stages[0].incarnation
        os.kill(rank.server_info.pid, signal.SIGKILL)
        for event in fleet.watch():
            settled = [s.report for s in event.fleet.stages if s.incarnation > before and s.routable]
            if any("kept" in {a.name for a in report.adapters} and not report.update_id for report in settled):
                break
        assert generated(fleet, "kept") == (merged_says(model, PROMPT, tensors), {"k"})
        dropped = publisher.update(tiny[0], version="without", adapters="drop")
    assert list(dropped.operation.dropped_adapters)
    assert listed(fleet) == set()
    with pytest.raises(RlctlError) as unknown:
        generated(fleet, "kept")
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND
