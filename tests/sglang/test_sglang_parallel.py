"""A trainer's publisher and one real SGLang of two tensor-parallel ranks, of which one can be made to lose a tensor.

Other engines join for single tests, which heal them or are healed by them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stale_decode
from digests import holds
from heals import check_healed
from interrupted_weights import Interrupted
from joining import joined
from models import changed, greedy

import rlctl
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PROMPTS = [encode("1+2=3"), encode("45+6=51")]


def generates_like(fleet: Fleet, model: Any, version: common.WeightVersion) -> None:
    response = fleet.generate(encode("3+"), max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert list(response.samples[0].output_ids) == greedy(model, encode("3+"), 12)
    assert [span.version.label for span in response.samples[0].versions] == [version.label]


def test_what_two_ranks_hold_can_be_digested(pair: Fleet, tiny: tuple[Any, Path]) -> None:
    (stage,) = pair.status().stages
    layout = stage.registration.layout
    assert [(worker.rank, worker.tp) for worker in layout.workers] == [(0, 0), (1, 1)]
    assert stage.report.model_digest == rlctl.model_digest(tiny[0])
    levels = stage.registration.capabilities.verification
    assert common.VERIFICATION_LEVEL_EXPECTED in levels
    assert common.VERIFICATION_LEVEL_RECEIVED in levels
    (result,) = pair.call(v.CheckWeightsRequest()).stage_results
    assert [rank.evidence for rank in result.rank_results] == [common.EVIDENCE_RANK] * 2
    ranks = {rank.check.rank_digest for rank in result.rank_results}
    assert len(ranks) == 2, "each holds parts of its own"


def test_stale_decode_shows_in_the_decode_check_only(pair: Fleet, tiny: tuple[Any, Path], sabotage: Path) -> None:
    stale_decode.shows_in_the_decode_check_only(pair, "pair", tiny[0], sabotage)


@pytest.mark.parametrize(("path", "digest"), [("ipc", "sha256"), ("ipc", "keyed"), ("broadcast", "keyed")])
def test_every_rank_takes_its_part(pair: Fleet, tiny: tuple[Any, Path], path: str, digest: str) -> None:
    publisher = pair.publisher("actor", trainer="test", path=path)
    try:
        model = changed(tiny[0], seed=len(path + digest))
        result = publisher.update(model, version=path + digest, digest=digest)
        assert ("@" in result.model_digest) == (digest == "keyed")
        assert result.model_digest == rlctl.model_digest(model, like=result.model_digest)
        (stage,) = result.operation.stage_results
        assert stage.verified == common.VERIFICATION_LEVEL_EXPECTED
        generates_like(pair, model, result.version)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("path", "orders", "verify", "digest"),
    [
        ("ipc", "drop:model.layers.1.mlp.down_proj.weight", "", "sha256"),
        ("broadcast", "drop:model.layers.0.self_attn.k_proj.weight", "", "keyed"),
        ("ipc", "drop:model.layers.0.self_attn.v_proj.weight", "probe", ""),
        ("ipc", "drop:model.norm.weight", "", "keyed"),
        ("ipc", "flip:model.layers.1.self_attn.o_proj.weight", "", "keyed"),
        ("ipc", "swap:model.layers.0.mlp.gate_proj.weight,model.layers.0.mlp.up_proj.weight", "", "keyed"),
        ("broadcast", "stale:", "", "sha256"),
    ],
    ids=["ipc", "broadcast", "probe", "replicated", "flipped bit", "swapped pair", "stale rank"],
)
def test_a_rank_that_acknowledges_what_it_has_not_done_is_noticed(
    pair: Fleet, tiny: tuple[Any, Path], sabotage: Path, path: str, orders: str, verify: str, digest: str
) -> None:
    kind, names = orders.split(":")
    name = sorted(names.split(","))[0]
    publisher = pair.publisher("actor", trainer="test", path=path)
    try:
        model = changed(tiny[0], seed=sum(orders.encode()))
        how: dict[str, Any] = {"digest": digest}
        if verify:
            how |= {"probe": Probe.of(model, PROMPTS, tolerance=1e-3), "verify": verify}
        sabotage.write_text(f"{orders}@1")
        try:
            with pytest.raises(OperationFailed) as failed:
                publisher.update(model, version=f"sabotaged {orders}", **how)
        finally:
            sabotage.unlink()
        (stage,) = failed.value.operation.stage_results
        assert stage.outcome == common.OUTCOME_DIRTY
        assert stage.error.reason == (Reason.PROBE_MISMATCH if verify else Reason.DIGEST_MISMATCH).name
        if not verify and "norm" not in name:
            reports = [rank.check.difference for rank in stage.rank_results]
            # Of a vocabulary this small rank 1 holds nothing.
            count = {"stale": len(dict(tiny[0].named_parameters())) - 2, "swap": 2}.get(kind, 1)
            assert [report.count for report in reports] == [count] * 2, stage.error.message
            assert all(report.first == (name or report.first) for report in reports), reports
            assert [report.part.differs for report in reports] == [False, True], reports
        (now,) = pair.status().stages
        assert now.report.state == common.STAGE_STATE_DIRTY
        assert not now.routable
        result = publisher.update(model, version="whole", **how)
        (stage,) = result.operation.stage_results
        assert stage.verified == (common.VERIFICATION_LEVEL_PROBE if verify else common.VERIFICATION_LEVEL_EXPECTED)
        generates_like(pair, model, result.version)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("path", "orders"),
    [
        ("ipc", "flip-shadow:model.layers.1.mlp.down_proj.weight"),
        ("broadcast", "flip-shadow:model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_a_flipped_bit_of_a_shadow_copy_is_named_before_anything_is_swapped(
    pair: Fleet, tiny: tuple[Any, Path], sabotage: Path, path: str, orders: str
) -> None:
    """The server serves on, whole; the same update without the flipped bit goes well."""
    publisher = pair.publisher("actor", trainer="staged", path=path)
    try:
        old, new = changed(tiny[0], seed=80), changed(tiny[0], seed=81)
        before = publisher.update(old, version=f"before {path}").version
        sabotage.write_text(f"{orders}@1")
        try:
            with pytest.raises(OperationFailed) as failed:
                publisher.update(new, version=f"flipped {path}", apply="staged")
        finally:
            sabotage.unlink()
        (stage,) = failed.value.operation.stage_results
        assert (stage.outcome, stage.error.reason) == (common.OUTCOME_REJECTED, Reason.DIGEST_MISMATCH.name)
        reports = [rank.check.difference for rank in stage.rank_results]
        assert [(report.count, report.first) for report in reports] == [(1, orders.partition(":")[2])] * 2
        assert [report.part.differs for report in reports] == [False, True], reports
        (now,) = pair.status().stages
        assert now.report.state == common.STAGE_STATE_READY
        assert holds([now.report.model_digest], old)
        generates_like(pair, old, before)
        served: list[tuple[bool, bool]] = []

        def serve() -> None:
            generates_like(pair, old, before)
            (now,) = pair.status().stages
            served.append((now.routable, bool(now.staging_update_id)))

        result = publisher.update(Interrupted(new, serve), version=f"whole {path}", apply="staged")
        # Segments are filled before the stage is told of the first one, and maybe before it has prepared.
        assert served == [(True, path == "broadcast" or served[0][1])]
        assert 0 < result.pause_s < result.total_s
        (stage,) = result.operation.stage_results
        assert stage.verified == common.VERIFICATION_LEVEL_EXPECTED
        assert [rank.evidence for rank in stage.rank_results] == [common.EVIDENCE_VERIFIED] * 2
        generates_like(pair, new, result.version)
    finally:
        publisher.close()


def test_it_heals_a_torch_engine_and_is_healed_by_it_with_weights_that_no_disk_has(
    pair: Fleet, two_ranks: LaunchedFleet, tiny: tuple[Any, Path], sabotage: Path
) -> None:
    first, second = changed(tiny[0], seed=21), changed(tiny[0], seed=22)
    with pair.publisher("actor", trainer="test") as publisher:
        publisher.update(first, version="before solo")
        with joined(two_ranks, EngineSpec("solo", str(tiny[1]), engine="torch")):
            check_healed(pair, "solo", first)
            sabotage.write_text("drop:model.layers.1.mlp.down_proj.weight@1")
            try:
                result = publisher.update(second, version="without the pair", quorum=1)
            finally:
                sabotage.unlink()
            outcomes = {stage.slot: stage.outcome for stage in result.operation.stage_results}
            assert outcomes == {"pair": common.OUTCOME_DIRTY, "solo": common.OUTCOME_APPLIED}
            pair.heal(["pair"])
            check_healed(pair, "pair", second, ranks=2)
    generates_like(pair, second, result.version)


@pytest.mark.long
@pytest.mark.timeout(800)  # the server starts twice
def test_a_rank_that_is_killed_inside_a_load_ends_the_update_and_its_server_is_healed(
    pair: Fleet, tiny: tuple[Any, Path]
) -> None:
    model = changed(tiny[0], seed=24)
    before = pair.update_weights_from_disk(str(tiny[1]), version="before the kill").weight_version
    (rank, _) = pair.call(v.GetServerInfoRequest()).stage_results[0].rank_results
    incarnation = pair.status().stages[0].incarnation
    killed: list[int] = []

    def kill() -> None:
        (scheduler,) = schedulers(rank.server_info.pid, "scheduler_TP1")
        os.kill(scheduler, signal.SIGKILL)
        killed.append(scheduler)

    with (
        pair.publisher("actor", trainer="kills", path="broadcast", bucket_bytes=16 << 10) as publisher,
        pytest.raises(OperationFailed) as failed,
    ):
        publisher.update(Interrupted(model, kill), version="never", retries=0, deadline_s=120)
    assert killed
    (stage,) = failed.value.operation.stage_results
    assert stage.outcome in (common.OUTCOME_UNKNOWN, common.OUTCOME_DIRTY)
    assert stage.error.reason in (Reason.ENGINE_FAILED.name, Reason.UNREACHABLE.name, Reason.GROUP_FAILED.name)
    with contextlib.closing(pair.watch()) as events:
        for event in events:
            (now,) = event.fleet.stages
            if now.incarnation > incarnation and now.routable:
                break
    assert now.report.weight_version == before
    generates_like(pair, tiny[0], before)


def schedulers(server: int, name: str) -> Iterator[int]:
    """The processes of a server with this in their titles."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == os.getpgid(server) and name in (process / "cmdline").read_text():
                yield int(process.name)


@pytest.mark.long
def test_a_second_server_joins_late_and_is_healed_by_the_first_with_weights_that_no_disk_has(
    pair: Fleet, two_ranks: LaunchedFleet, tiny: tuple[Any, Path]
) -> None:
    model = changed(tiny[0], seed=23)
    with pair.publisher("actor", trainer="test") as publisher:
        publisher.update(model, version="before twin")
    with joined(two_ranks, EngineSpec("twin", str(tiny[1]), engine="sglang", tp_size=2)):
        check_healed(pair, "twin", model, ranks=2)
