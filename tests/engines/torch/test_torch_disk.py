"""Weights from disk: paths and formats that are taken, what a failed load leaves behind, pulling beside generation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_torch_updates import all_refuse, check_serves, digest
from torch_models import greedy, prompt_of
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Stage

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    GetServerInfoRequest,
    InspectCheckpointRequest,
    PullWeightsRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.checkpoint.checkpoint import Checkpoint, open_checkpoint
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full
from tests.support.flattened import save_flattened

PROMPT = prompt_of(9)


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    """Every test starts and ends with the first checkpoint's weights and nothing open."""
    yield
    if stage.engine._rank.update is not None:
        await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
    await load(stage, stage.config.model_path, abort_all_requests=True)
    await stage(ContinueGenerationRequest())


@pytest.fixture(scope="module")
def new(checkpoints) -> str:
    """A checkpoint with other weights."""
    return checkpoints(seed=1)


def sharded(path: Path, of: str, tensors: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint of two files with an index."""
    path.mkdir()
    shutil.copy(Path(of, "config.json"), path)
    tensors = tensors or tensors_of(of)
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number - 1 :: 2]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def disk(path: str | Path, **fields: Any) -> UpdateWeightsFromDiskRequest:
    return UpdateWeightsFromDiskRequest(model_path=str(path), **fields)


async def refuse_everywhere(stage: Stage, path: str | Path, reason: Reason, **fields: Any) -> RlctlError:
    """Both asking and loading refuse, before anything was touched; the stage serves as before."""
    asked = await all_refuse(stage, InspectCheckpointRequest(model_path=str(path), **fields))
    update = await prepare(stage)
    error = await all_refuse(stage, disk(path, **fields), update=update)
    assert (error.reason, error.outcome) == (reason, OUTCOME_REJECTED), error
    assert (asked.reason, asked.field) == (error.reason, error.field)
    await stage(AbortUpdateRequest(), update=update)
    assert await digest(stage) == digest_of(stage.config.model_path)
    return error


async def test_a_sharded_checkpoint_is_loaded_slice_by_slice(stage: Stage, new: str, tmp_path: Path) -> None:
    await load(stage, str(sharded(tmp_path / "sharded", new)))
    await check_serves(stage, new)


async def test_asking_first_tells_what_would_be_read_and_changes_nothing(stage: Stage, new: str) -> None:
    reports = await stage(InspectCheckpointRequest(model_path=new))
    assert {report.tensors for report in reports} == {len(tensors_of(new))}
    assert {report.left for report in reports} == {0}
    assert sum(report.bytes for report in reports) >= sum(tensor.nbytes for tensor in tensors_of(new).values())
    assert await digest(stage) == digest_of(stage.config.model_path)


async def test_paths_outside_of_the_allowed_directories_are_refused(
    stage: Stage, new: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.getbasetemp().parent / f"outside-{os.getpid()}"
    shutil.copytree(new, outside)
    try:
        linked = tmp_path / "linked"
        linked.symlink_to(outside)
        mixed = tmp_path / "mixed"
        mixed.mkdir()
        shutil.copy(Path(new, "config.json"), mixed)
        (mixed / "model.safetensors").symlink_to(outside / "model.safetensors")
        for path in (outside, linked, mixed, tmp_path / ".." / ".." / ".." / outside.name, "/etc", "/"):
            error = await refuse_everywhere(stage, path, Reason.PATH_NOT_ALLOWED)
            assert error.field == "model_path"
            assert str(Path(stage.config.model_path).parent) in error.message
        pull = PullWeightsRequest(source_dir=str(linked), local_checkpoint_dir=str(tmp_path / "x"), target_version="v")
        assert (await all_refuse(stage, pull)).field == "source_dir"
        pull = PullWeightsRequest(source_dir=str(tmp_path), local_checkpoint_dir=str(linked / "x"), target_version="v")
        error = await all_refuse(stage, pull)
        assert (error.reason, error.field) == (Reason.PATH_NOT_ALLOWED, "local_checkpoint_dir")
    finally:
        shutil.rmtree(outside)
    (info, *_) = await stage(GetServerInfoRequest())
    assert str(Path(stage.config.model_path).parent) in info.settings["allowed_roots"].split(":")


async def test_whoever_starts_the_engine_names_the_directories(checkpoints, new: str, tmp_path: Path) -> None:
    allowed = tmp_path / "runs"
    allowed.mkdir()
    inside = shutil.copytree(new, allowed / "step-1")
    stage = Stage(checkpoints(), allowed_roots=f"{allowed}:{tmp_path / 'later'}")
    await stage.start()
    await load(stage, str(inside))
    assert (await all_refuse(stage, InspectCheckpointRequest(model_path=new))).reason is Reason.PATH_NOT_ALLOWED
    # What it was started with can always be gone back to.
    await load(stage, checkpoints())
    await stage.stop()
    with pytest.raises(RlctlError, match="no absolute path"):
        Stage(checkpoints(), allowed_roots="here:/there")


@pytest.mark.parametrize("damage", ["truncated", "missing", "index lies", "index names another file", "single"])
async def test_a_damaged_checkpoint_is_refused_before_the_first_byte(
    stage: Stage, new: str, tmp_path: Path, damage: str
) -> None:
    path = sharded(tmp_path / "damaged", new)
    shard, index = path / "model-00002-of-00002.safetensors", path / "model.safetensors.index.json"
    expected = Reason.CHECKPOINT_NOT_FOUND
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif damage == "missing":
        shard.unlink()
    elif damage == "single":
        shutil.copy(Path(new, "model.safetensors"), path)
        expected = Reason.CHECKPOINT_MISMATCH
    else:
        weight_map = json.loads(index.read_text())["weight_map"]
        first = next(iter(weight_map))
        other = "model-00002-of-00002.safetensors" if damage == "index lies" else "../elsewhere.safetensors"
        index.write_text(json.dumps({"weight_map": {**weight_map, first: other}}))
        expected = Reason.CHECKPOINT_MISMATCH
    await refuse_everywhere(stage, path, expected)
    await check_serves(stage, stage.config.model_path)


async def test_weights_do_not_change_with_the_file_that_they_came_from(stage: Stage, new: str, tmp_path: Path) -> None:
    path = shutil.copytree(new, tmp_path / "copy")
    await load(stage, str(path))
    file = path / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(file.stat().st_size // 2)
        raw.write(os.urandom(file.stat().st_size // 2))
    await check_serves(stage, new)
    os.truncate(file, 10)
    await check_serves(stage, new)
    shutil.rmtree(path)
    await check_serves(stage, new)


@pytest.fixture
def fail_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A disk that cannot be read on, at rank 0, once some tensors are in place; ``fail(path)`` says below where."""

    def fail(*paths: str) -> None:
        read, count = TensorFile.read_bytes, 0

        def failing(file: TensorFile, offset: int, into: torch.Tensor) -> None:
            nonlocal count
            if str(file.path).startswith(paths):
                count += 1
                if count > 5:
                    raise file._unreadable("it cannot be read: Input/output error")
            read(file, offset, into)

        monkeypatch.setattr(TensorFile, "read_bytes", failing)

    yield fail
    monkeypatch.undo()


async def test_a_load_that_fails_in_the_middle_is_rolled_back(
    stage: Stage, new: str, checkpoints, fail_in_the_middle: Any
) -> None:
    third = checkpoints(seed=2)
    await load(stage, new)
    fail_in_the_middle(third)
    update = await prepare(stage)
    error = await all_refuse(stage, disk(third), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    assert "again what they were before" in error.message
    await stage(AbortUpdateRequest(), update=update)
    await stage(ContinueGenerationRequest())
    await check_serves(stage, new)


async def test_a_load_can_be_repeated_after_it_was_rolled_back(
    stage: Stage, new: str, fail_in_the_middle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = await prepare(stage)
    fail_in_the_middle(new)
    await all_refuse(stage, disk(new), update=update)
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_REJECTED)
    monkeypatch.undo()
    await stage(disk(new), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_another_digest_than_expected_is_rolled_back(stage: Stage, new: str) -> None:
    update = await prepare(stage)
    error = await all_refuse(stage, disk(new, expected_digest="0" * 64), update=update)
    assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, OUTCOME_REJECTED)
    assert error.metadata["found"] == digest_of(new)
    await stage(AbortUpdateRequest(), update=update)
    await check_serves(stage, stage.config.model_path)


async def test_a_load_whose_way_back_fails_too_is_dirty(
    stage: Stage, new: str, tmp_path: Path, fail_in_the_middle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(new, tmp_path / "copy")
    await load(stage, str(path))
    fail_in_the_middle(str(path), stage.config.model_path)
    update = await prepare(stage)
    error = await all_refuse(stage, disk(stage.config.model_path), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_DIRTY)
    assert error.message.count("Input/output error") == 2
    monkeypatch.undo()
    assert (await all_refuse(stage, CommitUpdateRequest(), update=update)).outcome == OUTCOME_DIRTY
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.WEIGHTS_DIRTY


@pytest.mark.parametrize("kind", [UPDATE_KIND_FULL, UPDATE_KIND_PARTIAL])
async def test_a_load_that_fails_after_another_one_leaves_nothing_to_commit(
    stage: Stage, new: str, fail_in_the_middle: Any, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    update = await prepare(stage, kind=kind)
    await stage(disk(stage.config.model_path), update=update)
    fail_in_the_middle(new)
    assert (await all_refuse(stage, disk(new), update=update)).outcome == OUTCOME_DIRTY
    monkeypatch.undo()
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
    await stage(disk(new), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_the_files_that_were_replaced_are_read_again(stage: Stage, new: str, tmp_path: Path) -> None:
    path = shutil.copytree(new, tmp_path / "local")
    await load(stage, str(path))
    shutil.rmtree(path)
    shutil.copytree(stage.config.model_path, path)
    update = await prepare(stage)
    error = await all_refuse(stage, disk(path, expected_digest="0" * 64), update=update)
    assert error.outcome == OUTCOME_REJECTED
    await stage(AbortUpdateRequest(), update=update)
    await check_serves(stage, new)


@pytest.mark.parametrize("why", ["written to", "checked before"])
async def test_what_cannot_be_rolled_back_is_dirty(stage: Stage, new: str, tmp_path: Path, why: str) -> None:
    path = shutil.copytree(new, tmp_path / "copy")
    await load(stage, str(path))
    file = path / "model.safetensors"
    status = file.stat()
    with file.open("r+b") as raw:
        raw.seek(status.st_size - 4)
        raw.write(b"\x01\x02\x03\x04")
    if why == "checked before":
        # The file pretends to be the same; the digest that was computed meanwhile knows better.
        await stage(CheckWeightsRequest())
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    update = await prepare(stage)
    error = await all_refuse(stage, disk(stage.config.model_path, expected_digest="0" * 64), update=update)
    assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, OUTCOME_DIRTY)
    assert "could not be brought back" in error.message
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.WEIGHTS_DIRTY
    await load(stage, new)
    await check_serves(stage, new)


async def test_weights_that_came_over_a_group_have_no_way_back(stage: Stage, new: str) -> None:
    async with Source(stage) as source:
        update = await prepare(stage)
        await source.send(tensors_of(new), update)
        await stage(CommitUpdateRequest(), update=update)
    update = await prepare(stage)
    error = await all_refuse(stage, disk(new, expected_digest="0" * 64), update=update)
    assert error.outcome == OUTCOME_DIRTY
    await stage(AbortUpdateRequest(), update=update)


async def test_modules_are_loaded_and_the_rest_stays(stage: Stage, new: str, tmp_path: Path) -> None:
    modules = ["model.layers.1", "lm_head"]
    chosen = {
        name: tensor for name, tensor in tensors_of(new).items() if name.startswith(("model.layers.1.", "lm_head."))
    }
    path = sharded(tmp_path / "part", new, chosen)
    reports = await stage(InspectCheckpointRequest(model_path=str(path), target_modules=modules))
    assert {report.tensors for report in reports} == {len(chosen)}
    assert {report.left for report in reports} == {len(tensors_of(new)) - len(chosen)}
    update = await prepare(stage)
    error = await all_refuse(stage, disk(path, target_modules=modules), update=update)
    assert (error.reason, error.outcome, error.field) == (Reason.FIELD_CONFLICT, OUTCOME_REJECTED, "target_modules")
    await stage(AbortUpdateRequest(), update=update)
    update = await prepare(stage, kind=UPDATE_KIND_PARTIAL)
    for names, field in ((["model.layers.1", "model.layer"], "target_modules[1]"), (["lm"], "target_modules[0]")):
        error = await all_refuse(stage, disk(path, target_modules=names), update=update)
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, field)
    error = await all_refuse(stage, disk(path, target_modules=["model.norm"]), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_MISMATCH, OUTCOME_REJECTED)
    (report, *_) = await stage(disk(path, target_modules=modules), update=update)
    assert report.tensors == len(chosen)
    await stage(CommitUpdateRequest(), update=update)
    expected = ModelDigest()
    for name, tensor in {**tensors_of(stage.config.model_path), **chosen}.items():
        expected.add(name, tensor)
    assert await digest(stage) == expected.digest()


async def test_packed_buckets_on_disk(stage: Stage, new: str, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    path.mkdir()
    shutil.copy(Path(new, "config.json"), path)
    tensors = list(tensors_of(new).items())
    parts = [dict(tensors[:7]), dict(tensors[7:])]
    buckets = [Bucket(n, [TensorMeta.of(*entry) for entry in part.items()], True) for n, part in enumerate(parts)]
    save_flattened(path, zip(buckets, parts, strict=True))
    update = await prepare(stage)
    await stage(disk(path, load_format="flattened_bucket"), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)
    assert (await refuse_format(stage, path, "")).reason is Reason.CHECKPOINT_MISMATCH
    assert (await refuse_format(stage, new, "flattened_bucket")).reason is Reason.CHECKPOINT_NOT_FOUND


async def refuse_format(stage: Stage, path: str | Path, load_format: str) -> RlctlError:
    return await all_refuse(stage, InspectCheckpointRequest(model_path=str(path), load_format=load_format))


async def test_direct_takes_the_engines_own_parameters(stage: Stage, new: str, tmp_path: Path) -> None:
    """Each rank's files hold its parameters in its own shapes, as other engines save their sharded state."""
    path = tmp_path / "direct"
    path.mkdir()
    shutil.copy(Path(new, "config.json"), path)
    size = stage.config.tp_size
    shards = stage.engine._rank.model.shards.shards
    for rank in range(size):
        local = {}
        for name, full in tensors_of(new).items():
            part = shards[name].slice
            local[name] = full if part.dim is None else full.narrow(part.dim, rank * part.length, part.length)
        for number, names in enumerate((list(local)[:5], list(local)[5:])):
            mine = {name: local[name].contiguous() for name in names}
            save_file(mine, path / f"model-rank-{rank}-part-{number}.safetensors")
    update = await prepare(stage)
    await stage(disk(path, load_format="direct"), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)
    (path / f"model-rank-{size}-part-0.safetensors").write_bytes(b"")
    error = await refuse_format(stage, path, "direct")
    assert (error.reason, "not of" in error.message) == (Reason.CHECKPOINT_MISMATCH, True)


opened: list[str] = []


def swapped(path: str) -> Checkpoint:
    opened.append(path)
    return open_checkpoint(path)


class Failing(Checkpoint):
    def read_into(self, wanted: Any, *, threads: int = 0) -> int:
        super().read_into(wanted[:3])
        raise ZeroDivisionError("a defect")


def failing(path: str) -> Checkpoint:
    found = open_checkpoint(path)
    return Failing(path, found.config, found.files)


def breaking(path: str) -> Checkpoint:
    raise KeyError(path)


@pytest.fixture
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three loaders are installed."""
    about = tmp_path / "loaders-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loaders\nVersion: 1.0\n")
    names = ("swapped", "failing", "breaking")
    points = [f"{name} = {__name__}:{name}" for name in names]
    (about / "entry_points.txt").write_text("\n".join(["[rlctl.loaders]", *points]))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("loaders")
async def test_a_loader_is_found_by_the_name_it_was_installed_under(stage1: Stage, new: str) -> None:
    opened.clear()
    update = await prepare(stage1)
    await stage1(disk(new, load_format="swapped"), update=update)
    await stage1(CommitUpdateRequest(), update=update)
    assert opened == [new]
    await check_serves(stage1, new)
    await load(stage1, stage1.config.model_path)


@pytest.mark.usefixtures("loaders")
async def test_a_loader_that_fails_in_the_middle_is_rolled_back(stage1: Stage, new: str) -> None:
    update = await prepare(stage1)
    error = await all_refuse(stage1, disk(new, load_format="failing"), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    assert "a defect" in error.message
    error = await all_refuse(stage1, disk(new, load_format="breaking"), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    await stage1(AbortUpdateRequest(), update=update)
    await check_serves(stage1, stage1.config.model_path)


async def test_names_that_nobody_registered_are_never_imported(stage: Stage, new: str) -> None:
    for name in ("os:system", "os.system", "rlctl.weights.checkpoint.checkpoint.open_checkpoint", "pt"):
        error = await refuse_format(stage, new, name)
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "load_format")
        assert "direct, flattened_bucket, safetensors" in error.message


async def test_pulling_goes_on_beside_generation_and_then_the_copy_is_loaded(
    stage: Stage, new: str, checkpoints, tmp_path: Path
) -> None:
    source, local, trainer = tmp_path / "published", tmp_path / "host" / "local", tmp_path / "trainer"
    first, second = tensors_of(new), tensors_of(checkpoints(seed=2))
    publish_full(source, first.items(), version="step-1", sequence=1, files_from=new)
    pull = PullWeightsRequest(source_dir=str(source), local_checkpoint_dir=str(local), target_version="step-1")
    generating = asyncio.create_task(stage.tokens(PROMPT, 40))
    reports = await stage(pull)
    assert sorted(report.changed for report in reports) == [False] * (len(reports) - 1) + [True]
    assert {(report.version, report.sequence, report.model_digest) for report in reports} == {
        ("step-1", 1, digest_of(new))
    }
    assert await generating == greedy(stage.config.model_path, PROMPT, 40)
    assert await digest(stage) == digest_of(stage.config.model_path), "a pull does not touch the weights"
    (asked, *_) = await stage(InspectCheckpointRequest(model_path=str(local)))
    assert (asked.version, asked.model_digest) == ("step-1", digest_of(new))
    update = await prepare(stage)
    await stage(disk(local, expected_digest=reports[0].model_digest), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)
    # The next one comes as a delta, into the very directory that the weights came from.
    shutil.copytree(local, trainer)
    publish_delta(source, second.items(), version="step-2", sequence=2, base=BaseVersion(trainer))
    pull.target_version = "step-2"
    reports = await stage(pull)
    assert {report.deltas for report in reports if report.changed} == {1}
    await check_serves(stage, new)
    update = await prepare(stage)
    await stage(disk(local, expected_digest=reports[0].model_digest), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, checkpoints(seed=2))


async def test_a_pull_that_fails_is_typed_and_everything_is_as_it_was(stage: Stage, new: str, tmp_path: Path) -> None:
    source, local = tmp_path / "published", tmp_path / "local"
    made = publish_full(source, tensors_of(new).items(), version="step-1", sequence=1, files_from=new)
    pull = PullWeightsRequest(source_dir=str(source), local_checkpoint_dir=str(local), target_version="step-2")
    error = await all_refuse(stage, pull)
    assert (error.reason, error.field) == (Reason.CHECKPOINT_NOT_FOUND, "target_version")
    os.truncate(made.path / "model.safetensors", 5000)
    pull.target_version = "step-1"
    error = await all_refuse(stage, pull)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    assert not local.exists()
    pull.local_checkpoint_dir = stage.config.model_path
    assert (await all_refuse(stage, pull)).reason in (Reason.FIELD_INVALID, Reason.CHECKPOINT_NOT_FOUND)
    await check_serves(stage, stage.config.model_path)
    assert tensors_of(stage.config.model_path)
