"""Pulling and loading through a coordinator: an update that fails on the disk leaves a stage that serves as before."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_source import digest_of, tensors_of

from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, PAUSE_MODE_RETRACT, STAGE_STATE_READY
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation
from rlctl.v1.verbs_pb2 import (
    InspectCheckpointRequest,
    PullWeightsRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full


@pytest.fixture
async def fleet(checkpoints, tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    """Two stages of one rank, which share a host and so a local directory."""
    specs = [StageSpec(slot, checkpoints(), engine="torch") for slot in ("a", "b")]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


async def update(fleet: InProcessFleet, path: str | Path, label: str, **fields: Any) -> Operation:
    """An update from disk under a pause."""
    options = UpdateOptions(pause=PAUSE_MODE_RETRACT)
    request = UpdateWeightsFromDiskRequest(model_path=str(path), weight_version=label, options=options, **fields)
    operation: Operation = await fleet.stub.UpdateWeightsFromDisk(request)
    return operation


async def test_versions_are_pulled_loaded_and_verified(fleet: InProcessFleet, checkpoints, tmp_path: Path) -> None:
    source, local, trainer = tmp_path / "published", tmp_path / "local", tmp_path / "trainer"
    new = [checkpoints(seed=1), checkpoints(seed=2)]
    for number, path in enumerate(new, 1):
        label = f"step-{number}"
        weights = tensors_of(path).items()
        if number == 1:
            publish_full(source, weights, version=label, sequence=1, files_from=path)
        else:
            publish_delta(source, weights, version=label, sequence=number, base=BaseVersion(trainer))
        pulled = await fleet.stub.PullWeights(
            PullWeightsRequest(source_dir=str(source), local_checkpoint_dir=str(local), target_version=label)
        )
        assert pulled.state == OPERATION_STATE_OK, pulled.error
        reports = [result.rank_results[0].pull for result in pulled.stage_results]
        assert sorted(report.changed for report in reports) == [False, True]
        assert {report.model_digest for report in reports} == {digest_of(path)}
        assert fleet.stage("a").report.weight_version.label != label, "a pull publishes nothing"
        done = await update(fleet, local, label, expected_digest=reports[0].model_digest)
        assert done.state == OPERATION_STATE_OK, done.error
        assert done.model_digest == digest_of(path)
        assert fleet.stage("b").report.weight_version.label == label
        shutil.rmtree(trainer, ignore_errors=True)
        shutil.copytree(local, trainer)


@pytest.mark.parametrize("fault", ["truncated", "no text", "elsewhere", "disk fails in the middle", "another digest"])
async def test_an_update_that_fails_on_the_disk_leaves_stages_that_serve(
    fleet: InProcessFleet, checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path, fields, reason = shutil.copytree(checkpoints(seed=1), tmp_path / "new"), {}, "CHECKPOINT_NOT_FOUND"
    if fault == "truncated":
        os.truncate(path / "model.safetensors", 10_000)
    elif fault == "no text":  # an error that could not be sent would be a silence until the time is up
        (path / "model.safetensors").rename(path / "model-1.safetensors")
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"\\ud800": "model-1.safetensors"}}')
        reason = "CHECKPOINT_MISMATCH"
    elif fault == "elsewhere":
        path, reason = Path("/etc"), "PATH_NOT_ALLOWED"
    elif fault == "another digest":
        fields, reason = {"expected_digest": "0" * 64}, "DIGEST_MISMATCH"
    else:
        read = TensorFile.read_bytes

        def failing(file: TensorFile, offset: int, into: torch.Tensor) -> None:
            if file.path.parent == path and offset > 20_000:
                raise file._unreadable("it cannot be read: Input/output error")
            read(file, offset, into)

        monkeypatch.setattr(TensorFile, "read_bytes", failing)
    asked = await fleet.stub.InspectCheckpoint(InspectCheckpointRequest(model_path=str(path)))
    assert (asked.state == OPERATION_STATE_OK) == (fault in ("disk fails in the middle", "another digest"))
    failed = await update(fleet, path, "step-1", **fields)
    assert failed.state == OPERATION_STATE_FAILED
    assert failed.error.reason == reason
    assert [result.outcome for result in failed.stage_results] == [OUTCOME_REJECTED] * 2
    for slot in ("a", "b"):
        stage = fleet.stage(slot)
        assert (stage.report.state, stage.routable) == (STAGE_STATE_READY, True)
        assert stage.report.weight_version.label == "initial"
    monkeypatch.undo()
    done = await update(fleet, checkpoints(seed=2), "step-2")
    assert [result.outcome for result in done.stage_results] == [OUTCOME_APPLIED] * 2
