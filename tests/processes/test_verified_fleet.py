"""Verification with real ranks: what a mismatch names, the levels that a trainer asks for, deltas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.weights.tensor.source import as_source

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

CUT = "model.layers.0.mlp.up_proj.weight"
WHOLE = "model.norm.weight"
PROMPTS = [encode("1+2=3"), encode("7+8")]


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


def held(fleet: Fleet) -> set[str]:
    operation = fleet.check_weights()
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def levels(result: rlctl.UpdateResult) -> set[int]:
    return {stage.verified for stage in result.operation.stage_results}


@pytest.mark.parametrize(
    ("path", "apply", "digest"),
    [
        ("broadcast", "in_place", "sha256"),
        ("ipc", "in_place", "keyed"),
        ("broadcast", "staged", "keyed"),
        ("ipc", "staged", "sha256"),
    ],
)
def test_a_delta_sends_what_differs_from_its_base_and_proves_all(
    fleet: Fleet, path: str, apply: str, digest: str
) -> None:
    publisher = fleet.publisher("actor", path=path)
    model = demo_tiny.make(seed=5)
    with pytest.raises(RlctlError) as caught:
        publisher.update(model, version="early", base="initial")
    assert (caught.value.reason, caught.value.field) == (Reason.BASE_MISMATCH, "base")
    full = publisher.update(model, version=f"base-{path}", apply=apply, digest=digest)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    delta = publisher.update(model, version=f"delta-{path}", base=f"base-{path}", apply=apply)
    assert (full.tensors_sent, delta.tensors_sent) == (len(list(model.parameters())), 2)
    assert 0 < delta.bytes_sent < full.bytes_sent
    assert held(fleet) == {delta.model_digest} == {rlctl.model_digest(model, like=full.model_digest)}
    assert ("@" in delta.model_digest) == (digest == "keyed")
    assert levels(delta) == {common.VERIFICATION_LEVEL_EXPECTED}
    pending = publisher.update_async(model, version=f"same-{path}", base=f"delta-{path}", apply=apply)
    pending.wait_sent()
    nothing = pending.wait()
    assert (nothing.tensors_sent, nothing.bytes_sent) == (0, 0)
    assert held(fleet) == {rlctl.model_digest(model, like=full.model_digest)}
    assert fleet.status().models[0].latest == nothing.version
    other = fleet.publisher("actor")
    other.update(demo_tiny.make(seed=6), version="between")
    other.close()
    with pytest.raises(RlctlError) as caught:
        publisher.update(model, version="late", base=f"same-{path}")
    assert caught.value.reason is Reason.BASE_MISMATCH
    assert "'between'" in str(caught.value)
    publisher.close()


@pytest.mark.parametrize("path", ["broadcast", "ipc"])
def test_each_rank_digests_what_it_takes_in_when_asked_to(fleet: Fleet, path: str) -> None:
    publisher = fleet.publisher("actor", path=path, bucket_bytes=64 << 10)
    model = demo_tiny.make(seed=7)
    assert levels(publisher.update(model, version="received", verify="received")) == {
        common.VERIFICATION_LEVEL_RECEIVED
    }
    part = {name: parameter.detach() * 2 for name, parameter in list(model.named_parameters())[:3]}
    for apply, digest in (("in_place", "keyed"), ("staged", "sha256")):
        result = publisher.update(
            part.items(), version=f"part-{apply}", verify="received", digest=digest, partial=True, apply=apply
        )
        assert levels(result) == {common.VERIFICATION_LEVEL_RECEIVED}
    publisher.close()


def test_a_probe_is_what_the_engines_compute(fleet: Fleet) -> None:
    publisher = fleet.publisher("actor")
    model = demo_tiny.make(seed=8)
    probe = rlctl.Probe.of(model, PROMPTS, tolerance=1e-4)
    assert levels(publisher.update(model, version="probed", verify="probe", probe=probe)) == {
        common.VERIFICATION_LEVEL_PROBE
    }
    another = copy.deepcopy(model)
    with torch.no_grad():
        another.lm_head.weight.mul_(1.5)
    with pytest.raises(OperationFailed) as caught:
        publisher.update(another, version="other", verify="probe", probe=probe)
    results = caught.value.operation.stage_results
    assert {result.error.reason for result in results} == {"PROBE_MISMATCH"}
    assert {result.state for result in results} == {common.STAGE_STATE_DIRTY}
    result = publisher.update(model, version="again", probe=probe)
    assert levels(result) == {common.VERIFICATION_LEVEL_EXPECTED}, "the probe is beside the digest, not in its place"
    assert result.verification.computed == common.VERIFICATION_LEVEL_PROBE
    with pytest.raises(OperationFailed) as ignored:
        publisher.update(another, version="not so", probe=probe)
    assert {each.error.reason for each in ignored.value.operation.stage_results} == {"PROBE_MISMATCH"}
    publisher.update(model, version="whole", probe=probe)
    publisher.close()


class Counted:
    """Counts how often a model's tensors are gone through."""

    def __init__(self, model: Any) -> None:
        self._source = as_source(model)
        self.passes = 0

    def metas(self) -> Any:
        return self._source.metas()

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        yield from self._source.tensors()


def test_a_rank_that_skips_a_tensor_is_named(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    dropped = {"cut": CUT, "whole": WHOLE}
    engines = [
        EngineSpec(slot, str(tiny[1]), tp_size=2, environment={"RLCTL_TORCH_SABOTAGE": f"drop-tensor:{name}@1"})
        for slot, name in dropped.items()
    ]
    model = copy.deepcopy(tiny[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as running, running.connect() as fleet:
        publisher = fleet.publisher("actor")
        with pytest.raises(OperationFailed) as staged:
            publisher.update(model, version="skipped-in-copies", apply="staged", digest="keyed")
        assert {stage.state for stage in fleet.status().stages} == {common.STAGE_STATE_READY}
        pending = publisher.update_async(counted := Counted(model), version="not-waited-for", apply="staged")
        with pytest.raises(OperationFailed) as unnamed:
            pending.wait()
        assert counted.passes == 1, "they may be other ones by now"
        with pytest.raises(OperationFailed) as caught:
            publisher.update(counted, version="skipped")
        assert counted.passes == 3, "once more, to name the rank"
        with pytest.raises(OperationFailed) as by_key:
            publisher.update(model, version="skipped-by-key", digest="keyed")
        publisher.close()
        assert fleet.status().models[0].latest.label == "initial"
    cut = next(result for result in unnamed.value.operation.stage_results if result.slot == "cut")
    assert (cut.error.metadata["tensor"], cut.error.metadata["holders"]) == (CUT, "0,1")
    failed = (staged, caught, by_key)
    both = [result for failure in failed for result in failure.value.operation.stage_results]
    for result in both:
        assert result.error.reason == "DIGEST_MISMATCH"
        assert dropped[result.slot] in result.error.message
        assert "rank 1" in result.error.message
        assert result.error.metadata["tensor"] == dropped[result.slot]
        assert (result.error.metadata["ranks"], result.error.metadata["differing"]) == ("1", "1")
        assert [rank.check.difference.part.differs for rank in result.rank_results] == [False, True]
    assert "cut: " in str(caught.value)
    assert CUT in str(caught.value)
    assert "rank 1" in str(caught.value)
