"""A real vLLM of two tensor-parallel ranks, of which one can be made to lose a tensor, beside a torch engine.

Its ranks compute with plain parameters, as on GPUs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stale_decode
from digests import holds
from interrupted_weights import Interrupted
from models import changed, greedy
from native_stand_in import plug_in

import rlctl
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.sglang_api.rows import rows_of
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plug_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with vLLM's plug-ins, for PYTHONPATH."""
    place = tmp_path_factory.mktemp("parallel") / "plug-ins"
    for name in ("lossy_ranks", "plain_kernels"):
        plug_in(place, name)
    return place


@pytest.fixture(scope="module")
def lost(plug_ins: Path) -> Path:
    """The file with the order for a rank."""
    return plug_ins / "now"


@pytest.fixture(scope="module")
def fleet(
    vllm: str, tiny: tuple[Any, Path], plug_ins: Path, lost: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    paths = os.pathsep.join(filter(None, [str(plug_ins), os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": paths, "LOST": str(lost)}
    engines = [
        EngineSpec("pair", str(tiny[1]), engine="vllm", tp_size=2, environment=environment),
        EngineSpec("solo", str(tiny[1]), engine="torch"),
    ]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
        yield fleet


def stage_of(fleet: Fleet, slot: str) -> Any:
    return next(stage for stage in fleet.status().stages if stage.registration.slot == slot)


def both_generate_like(fleet: Fleet, model: Any, version: common.WeightVersion) -> None:
    said: dict[str, list[int]] = {}
    while len(said) < 2:  # a stage that was just admitted may not be known to the client yet
        response = fleet.generate(encode("3+"), max_new_tokens=12, temperature=0.0, ignore_eos=True)
        assert [span.version.label for span in response.samples[0].versions] == [version.label]
        said[response.slot] = list(response.samples[0].output_ids)
    assert said["pair"] == said["solo"] == greedy(model, encode("3+"), 12)


def test_what_two_ranks_hold_can_be_read_back(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    pair = stage_of(fleet, "pair")
    layout, capabilities = pair.registration.layout, pair.registration.capabilities
    assert [(worker.rank, worker.tp) for worker in layout.workers] == [(0, 0), (1, 1)]
    assert not capabilities.answers_for_ranks
    assert common.VERIFICATION_LEVEL_EXPECTED in capabilities.verification
    assert pair.report.model_digest == rlctl.model_digest(tiny[0])
    (result,) = fleet.call(v.CheckWeightsRequest(), slots=["pair"]).stage_results
    assert [rank.evidence for rank in result.rank_results] == [common.EVIDENCE_RANK] * 2
    assert {rank.check.model_digest for rank in result.rank_results} == {rlctl.model_digest(tiny[0])}
    for name, tensor in tiny[0].state_dict().items():
        read = v.CheckWeightsRequest(action=v.CHECK_ACTION_READ, tensor=name, rows=3)
        (result,) = fleet.call(read, slots=["pair"]).stage_results
        parts = [rank.check.values for rank in result.rank_results if rank.check.HasField("values")]
        assert rows_of(parts) == tensor[:3].tolist(), name


def test_stale_decode_shows_in_the_decode_check_only(fleet: Fleet, tiny: tuple[Any, Path], lost: Path) -> None:
    stale_decode.shows_in_the_decode_check_only(fleet, "pair", tiny[0], lost)


@pytest.mark.parametrize("mode", ["retract", "drain"])
def test_a_pause_that_fails_leaves_vllm_generating(fleet: Fleet, lost: Path, mode: str) -> None:
    """vLLM pauses its scheduler before the step that fails, and does not continue by itself."""
    lost.write_text("pause@1")
    try:
        with pytest.raises(OperationFailed) as failed:
            fleet.pause_generation(mode, slots=["pair"])
    finally:
        lost.unlink()
    (stage,) = failed.value.operation.stage_results
    assert {rank.outcome for rank in stage.rank_results} == {common.OUTCOME_REJECTED}
    assert stage_of(fleet, "pair").routable
    response = fleet.generate(encode("3+"), max_new_tokens=4, ignore_eos=True, slot="pair", timeout_s=20)
    assert len(response.samples[0].output_ids) == 4


@pytest.mark.parametrize(
    ("path", "level", "digest"),
    [
        ("ipc", "expected", "sha256"),
        ("broadcast", "expected", "keyed"),
        ("broadcast", "received", "keyed"),
        ("ipc", "probe", ""),
        ("disk", "expected", "sha256"),
    ],
)
def test_every_rank_takes_its_part_and_says_what_came(
    fleet: Fleet, tiny: tuple[Any, Path], path: str, level: str, digest: str
) -> None:
    model = changed(tiny[0], seed=len(path + level))
    settings: dict[str, Any] = {}
    if level == "probe":
        settings["probe"] = Probe.of(model, [encode("1+2=3")], tolerance=1e-3)
    if path == "disk":
        settings["checkpoint"] = str(tiny[1].parent / "in place")
        model.save_pretrained(settings["checkpoint"])
    by = "ipc" if path == "ipc" else "broadcast"
    with contextlib.closing(fleet.publisher("actor", trainer="test", path=by)) as publisher:
        result = publisher.update(model, version=f"{path} {level}", verify=level, digest=digest, **settings)
    if level == "expected":
        assert ("@" in result.model_digest) == (digest == "keyed")
        assert result.model_digest == rlctl.model_digest(model, like=result.model_digest)
    reached = common.VerificationLevel.Value(f"VERIFICATION_LEVEL_{level.upper()}")
    assert {stage.verified for stage in result.operation.stage_results} == {reached}
    pair = next(stage for stage in result.operation.stage_results if stage.slot == "pair")
    evidence = common.EVIDENCE_VERIFIED if level == "expected" else common.EVIDENCE_RANK
    assert [rank.evidence for rank in pair.rank_results] == [evidence] * 2
    both_generate_like(fleet, model, result.version)


def test_weights_that_compute_other_values_than_the_probe_are_not_published(
    fleet: Fleet, tiny: tuple[Any, Path]
) -> None:
    model, other = changed(tiny[0], seed=31), changed(tiny[0], seed=32)
    probe = Probe.of(other, [encode("1+2=3"), encode("3+4=7")])
    with contextlib.closing(fleet.publisher("actor", trainer="probing")) as publisher:
        with pytest.raises(OperationFailed) as wrong:
            publisher.update(model, version="not so", verify="probe", probe=probe)
        assert wrong.value.reason is Reason.QUORUM_NOT_MET
        stages = wrong.value.operation.stage_results
        assert {stage.error.reason for stage in stages} == {Reason.PROBE_MISMATCH.name}
        result = publisher.update(model, version="again")
    both_generate_like(fleet, model, result.version)


@pytest.mark.parametrize("path", ["ipc", "broadcast", "disk"])
def test_a_staged_update_is_received_while_requests_run(fleet: Fleet, tiny: tuple[Any, Path], path: str) -> None:
    old, new = changed(tiny[0], seed=80), changed(tiny[0], seed=81)
    settings: dict[str, Any] = {}
    if path == "disk":
        saved = tiny[1].parent / "staged"
        new.save_pretrained(saved)
        settings["checkpoint"] = str(saved)
    by = "ipc" if path == "ipc" else "broadcast"
    with contextlib.closing(fleet.publisher("actor", trainer="staged", path=by)) as publisher:
        before = publisher.update(old, version=f"before {path}").version
        served: list[bool] = []

        def serve() -> None:
            both_generate_like(fleet, old, before)
            served.append(all(stage.routable for stage in fleet.status().stages))

        result = publisher.update(Interrupted(new, serve), version=f"staged {path}", apply="staged", **settings)
    assert served == [True]
    assert 0 < result.pause_s < result.total_s
    pair = next(stage for stage in result.operation.stage_results if stage.slot == "pair")
    assert pair.verified == common.VERIFICATION_LEVEL_EXPECTED
    assert [rank.evidence for rank in pair.rank_results] == [common.EVIDENCE_VERIFIED] * 2
    both_generate_like(fleet, new, result.version)


@pytest.mark.parametrize(
    ("orders", "rank", "digest"),
    [
        ("drop:model.layers.1.mlp.down_proj.weight", 1, "keyed"),
        ("drop:model.embed_tokens.weight", 0, "sha256"),
        ("drop:model.norm.weight", 1, "keyed"),
        ("flip:model.layers.1.self_attn.o_proj.weight", 1, "keyed"),
        ("swap:model.layers.0.mlp.gate_proj.weight,model.layers.0.mlp.up_proj.weight", 1, "sha256"),
        ("stale:", 1, "keyed"),
    ],
    ids=["columns", "vocabulary", "replicated", "flipped bit", "swapped pair", "stale rank"],
)
def test_a_rank_that_acknowledges_what_it_has_not_done_is_noticed(
    fleet: Fleet, tiny: tuple[Any, Path], lost: Path, orders: str, rank: int, digest: str
) -> None:
    """vLLM notices nothing."""
    kind, names = orders.split(":")
    name = sorted(names.split(","))[0]
    model = changed(tiny[0], seed=sum(orders.encode()))
    with contextlib.closing(fleet.publisher("actor", trainer="test")) as publisher:
        lost.write_text(f"{orders}@{rank}")
        try:
            with pytest.raises(OperationFailed) as failed:
                publisher.update(model, version=f"lost {orders}", digest=digest)
        finally:
            lost.unlink()
        stage = next(stage for stage in failed.value.operation.stage_results if stage.slot == "pair")
        assert stage.outcome == common.OUTCOME_DIRTY
        assert stage.error.reason == Reason.DIGEST_MISMATCH.name
        assert name in stage.error.message
        if "norm" not in name:
            # Of a vocabulary this small rank 1 holds nothing.
            count = {"stale": len(dict(tiny[0].named_parameters())) - 2, "swap": 2}.get(kind, 1)
            reports = [result.check.difference for result in stage.rank_results]
            assert [report.count for report in reports] == [count] * 2
            if kind != "stale":
                assert [report.first for report in reports] == [name] * 2
                assert [report.part.differs for report in reports] == [number == rank for number in range(2)]
        now = stage_of(fleet, "pair")
        assert now.report.state == common.STAGE_STATE_DIRTY
        assert not now.routable
        result = publisher.update(model, version="whole")
        both_generate_like(fleet, model, result.version)


def test_a_load_that_one_rank_fails_in_leaves_the_answers_of_the_others_in_step(
    fleet: Fleet, tiny: tuple[Any, Path], lost: Path
) -> None:
    """Where vLLM's own call fails, it takes what the next ranks had said for their answers to the next call."""
    model = changed(tiny[0], seed=7)
    saved = tiny[1].parent / "seventh"
    model.save_pretrained(saved)
    lost.write_text("disk@0")
    try:
        with pytest.raises(OperationFailed) as failed:
            fleet.update_weights_from_disk(str(saved), version="never")
    finally:
        lost.unlink()
    pair = next(stage for stage in failed.value.operation.stage_results if stage.slot == "pair")
    assert (pair.outcome, "rank 0: vLLM: OSError: the disk is gone" in pair.error.message) == (
        common.OUTCOME_DIRTY,
        True,
    )
    operation = fleet.update_weights_from_disk(str(saved), version="seventh")
    both_generate_like(fleet, model, operation.weight_version)
    other = changed(tiny[0], seed=8)
    with contextlib.closing(fleet.publisher("actor")) as publisher:
        both_generate_like(fleet, other, publisher.update(other, version="eighth").version)


def test_two_ranks_heal_an_engine_with_weights_that_no_disk_has(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=5)
    with contextlib.closing(fleet.publisher("actor", trainer="survivor")) as publisher:
        result = publisher.update(model, version="survives")
    fleet.call(v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS), slots=["solo"])
    assert not stage_of(fleet, "solo").routable
    fleet.heal(["solo"])
    assert holds([stage_of(fleet, "solo").report.model_digest], model)
    both_generate_like(fleet, model, result.version)
