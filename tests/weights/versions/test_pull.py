"""Publishing and pulling versions: what arrives is what was published, bit for bit, or nothing changes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from weights_helpers import Background, digest_of

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import PullWeightsRequest
from rlctl.weights.checkpoint import atomic_write
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import CONFIG, open_checkpoint
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.versions import publish as publishing
from rlctl.weights.versions.manifest import MANIFEST, read_manifest
from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full, published
from rlctl.weights.versions.pull import Pulled, pull, pull_within

Model = dict[str, torch.Tensor]


def model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(40, 16, generator=generator).to(torch.bfloat16),
        "norm.weight": torch.randn(16, generator=generator),
        "scale": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3),
        "codes": torch.randint(0, 255, (7, 5), generator=generator, dtype=torch.uint8),
        "head.weight": torch.randn(16, 40, generator=generator).to(torch.bfloat16),
    }


def stepped(before: Model, seed: int, share: float = 0.1) -> Model:
    """Some elements of some tensors are others."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in list(after)[seed % 2 :: 2]:
        chosen = torch.rand(after[name].shape, generator=generator) < share
        after[name][chosen] += 1
    return after


def contents(path: str | Path) -> Model:
    checkpoint = open_checkpoint(str(path))
    return {name: checkpoint.read(name) for name in checkpoint.metas}


def same(found: Model, expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in found
    )


def snapshot(path: Path) -> dict[str, bytes] | None:
    return {file.name: file.read_bytes() for file in path.iterdir()} if path.exists() else None


class World:
    """A directory where versions are published, and local copies of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = path / "published"
        self.local = path / "host" / "actor"
        self.trainer = path / "trainer" / "actor"
        self.launch = path / "launch"
        self.launch.mkdir(parents=True)
        (self.launch / "config.json").write_text('{"model_type": "llama"}')
        (self.launch / "tokenizer.json").write_text("{}")
        self.models: dict[str, Model] = {}

    def full(self, sequence: int, weights: Model, **settings: Any) -> publishing.Published:
        self.models[f"v{sequence}"] = weights
        settings = {"shard_bytes": 1500, "files_from": self.launch, **settings}
        return publish_full(self.source, weights.items(), version=f"v{sequence}", sequence=sequence, **settings)

    def delta(self, sequence: int, weights: Model, **settings: Any) -> publishing.Published:
        """A delta to the version before."""
        self.models[f"v{sequence}"] = weights
        pull(str(self.source), str(self.trainer), f"v{sequence - 1}", base_dir=str(self.launch))
        settings = {"base": BaseVersion(self.trainer), **settings}
        return publish_delta(self.source, weights.items(), version=f"v{sequence}", sequence=sequence, **settings)

    def chain(self, length: int = 4, encoding: str = "xor") -> None:
        """A full version and deltas after it."""
        weights = model()
        self.full(1, weights)
        for sequence in range(2, length + 1):
            weights = stepped(weights, sequence)
            self.delta(sequence, weights, encoding=encoding)

    def pull(self, version: str, **settings: Any) -> Pulled:
        return pull(str(self.source), str(self.local), version, **settings)

    def check(self, version: str) -> None:
        """The local copy is that version, and nothing lies beside it."""
        assert same(contents(self.local), self.models[version])
        manifest = read_manifest(self.local)
        assert manifest is not None
        assert manifest.digest == digest_of(self.models[version])
        assert sorted(path.name for path in self.local.parent.iterdir()) == [f".{self.local.name}.lock", "actor"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Nothing here depends on what a disk keeps when the power fails, only on what it is told in which order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@contextmanager
def refused(reason: Reason, words: str | None = None, field: str | None = None) -> Iterator[None]:
    with pytest.raises(RlctlError, match=words) as caught:
        yield
    assert caught.value.reason is reason, caught.value
    assert field is None or caught.value.field == field


def test_a_full_version_is_a_checkpoint_as_it_lies_there(world: World) -> None:
    made = world.full(1, model())
    assert made.path.name == "00000001-v1"
    assert made.manifest.digest == digest_of(model())
    assert same(contents(made.path), model())
    files = sorted(made.path.glob("*.safetensors"))
    assert len(files) > 1
    assert same({name: t for file in files for name, t in load_file(file).items()}, model())
    assert (made.path / "tokenizer.json").read_text() == "{}"
    assert read_manifest(made.path) == made.manifest == published(world.source, "v1").manifest


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "m.onnx"])
def test_weights_in_other_forms_are_not_taken_for_files_beside_the_new_ones(world: World, name: str) -> None:
    (world.launch / name).write_bytes(b"weights of before")
    assert sorted(world.full(1, model()).manifest.files) == [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


def test_a_version_is_pulled_and_confirmed(world: World) -> None:
    world.full(1, model())
    first = world.pull("v1")
    assert (first.changed, first.deltas) == (True, 0)
    world.check("v1")
    assert (world.local / "tokenizer.json").read_text() == "{}"
    assert not world.pull("v1").changed


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_are_replayed_from_the_nearest_base(world: World, encoding: str) -> None:
    world.chain(5, encoding)
    assert world.pull("v3").deltas == 2
    world.check("v3")
    assert world.pull("v5").deltas == 2
    world.check("v5")
    shutil.rmtree(world.local)
    assert world.pull("v5").deltas == 4
    world.check("v5")
    # Back to an older one: from the full version, not by undoing.
    assert world.pull("v2").deltas == 1
    world.check("v2")


def test_a_local_copy_goes_on_when_the_versions_before_are_gone(world: World) -> None:
    world.chain(4)
    world.pull("v3")
    for version in ("v1", "v2", "v3"):
        shutil.rmtree(published(world.source, version).path)
    assert world.pull("v4").deltas == 1
    world.check("v4")
    shutil.rmtree(world.local)
    with refused(Reason.CHECKPOINT_NOT_FOUND, "'v3' .sequence 3., which is not published", "source_dir"):
        world.pull("v4")
    assert not world.local.exists()


def test_a_chain_may_begin_at_the_checkpoint_that_the_engine_was_started_with(world: World) -> None:
    world.models["v1"] = model()
    header = publish_full(world.path / "x", model().items(), version="x", sequence=1, files_from=world.launch)
    shutil.copy(header.path / "model.safetensors", world.launch)
    world.models["v2"] = stepped(model(), 2)
    publish_delta(
        world.source, world.models["v2"].items(), version="v2", sequence=2, base=BaseVersion(world.launch, "v1", 1)
    )
    with refused(Reason.CHECKPOINT_NOT_FOUND, "not published"):
        world.pull("v2")
    assert world.pull("v2", base_dir=str(world.launch)).deltas == 1
    world.check("v2")
    # Another checkpoint is not taken for it.
    shutil.rmtree(world.local)
    header = publish_full(world.path / "y", model(9).items(), version="y", sequence=1, files_from=world.launch)
    shutil.copy(header.path / "model.safetensors", world.launch)
    with refused(Reason.DIGEST_MISMATCH, "before"):
        world.pull("v2", base_dir=str(world.launch))
    assert not world.local.exists()


def test_a_chain_may_begin_at_a_checkpoint_whose_one_file_has_an_index(world: World) -> None:
    made = publish_full(world.path / "x", model().items(), version="x", sequence=1, files_from=world.launch)
    name = "model-00001-of-00001.safetensors"
    shutil.copy(made.path / "model.safetensors", world.launch / name)
    index = world.launch / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model(), name)}))
    world.models["v2"] = stepped(model(), 2)
    publish_delta(
        world.source, world.models["v2"].items(), version="v2", sequence=2, base=BaseVersion(world.launch, "v1", 1)
    )
    world.pull("v2", base_dir=str(world.launch))
    world.check("v2")
    # One without any file is another one.
    shutil.rmtree(world.local)
    index.write_text('{"weight_map": {}}')
    (world.launch / name).unlink()
    with refused(Reason.CHECKPOINT_MISMATCH, f"what {world.launch} holds does not fit"):
        world.pull("v2", base_dir=str(world.launch))
    assert not world.local.exists()


def test_what_did_not_change_is_not_stored_and_zeros_take_no_room(world: World) -> None:
    big = {"w": torch.randn(1 << 18), "still": torch.randn(1 << 16)}
    world.full(1, big)
    after = {**big, "w": big["w"].clone()}
    after["w"][::1000] += 1
    made = world.delta(2, after)
    assert made.manifest.tensors["still"].encoding == "same"
    assert sum(made.manifest.shards.values()) < big["w"].nbytes / 20
    world.pull("v2")
    world.check("v2")


def test_labels_are_any_text_and_the_latest_of_a_label_counts(world: World) -> None:
    for sequence, label in enumerate(["step/1", "step/1", "..", "ü*?["], 1):
        publish_full(world.source, model(sequence).items(), version=label, sequence=sequence, files_from=world.launch)
    assert pull(str(world.source), str(world.local), "step/1").manifest.sequence == 2
    assert pull(str(world.source), str(world.local), "ü*?[").manifest.version == "ü*?["
    assert same(contents(world.local), model(4))
    with refused(Reason.CHECKPOINT_NOT_FOUND, "'step' is not published", "target_version"):
        world.pull("step")
    for label, sequence in (("", 9), ("x" * 300, 9), ("\ud800", 9), ("x", 0)):
        with refused(Reason.FIELD_INVALID, "no version can be", "version"):
            publish_full(world.source, [], version=label, sequence=sequence, files_from=world.launch)


def test_publishing_again_confirms_and_other_weights_are_refused(world: World) -> None:
    world.chain(2)
    assert world.delta(2, world.models["v2"]).path.name == "00000002-v2"
    with refused(Reason.FIELD_INVALID, "with other weights. Use a higher sequence, or another directory", "version"):
        world.delta(2, model(5))
    with refused(Reason.FIELD_INVALID, "does not follow", "sequence"):
        world.full(1, model(5))
    assert {path.name for path in world.source.iterdir()} == {"00000001-v1", "00000002-v2"}


def test_the_same_weights_in_other_files_confirm_and_with_another_config_are_refused(world: World) -> None:
    world.full(1, model())
    world.full(1, model(), shard_bytes=1 << 30)
    (world.launch / CONFIG).write_text('{"model_type": "qwen3"}')
    with refused(Reason.FIELD_INVALID, "another config.json", "files_from"):
        world.full(1, model())


def test_a_tensor_that_would_be_taken_for_metadata_is_not_published(world: World) -> None:
    with refused(Reason.FIELD_INVALID, "__metadata__"):
        world.full(1, {**model(), "__metadata__": torch.zeros(2)})
    assert not list(world.source.iterdir())


def test_a_delta_of_another_shape_or_without_a_known_base_is_refused(world: World) -> None:
    world.full(1, model())
    with refused(Reason.CHECKPOINT_MISMATCH, "norm.weight"):
        world.delta(2, {**model(), "norm.weight": torch.zeros(3)})
    with refused(Reason.CHECKPOINT_MISMATCH, "another dtype"):
        world.delta(2, {**model(), "norm.weight": model()["norm.weight"].double()})
    plain = published(world.source, "v1").path
    (plain / MANIFEST).unlink()
    with refused(Reason.FIELD_REQUIRED, "which version it is", "base"):
        publish_delta(world.source, model().items(), version="v2", sequence=2, base=BaseVersion(plain))


class Otherwise:
    """Says what it has, and gives something else."""

    def __init__(self, says: Model, gives: list[tuple[str, torch.Tensor]]) -> None:
        self._says, self._gives = says, gives

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta.of(name, tensor) for name, tensor in self._says.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._gives


@pytest.mark.parametrize("kind", ["full", "delta"])
@pytest.mark.parametrize("gives", ["less", "more", "twice", "another order", "another shape", "another dtype"])
def test_what_is_not_what_was_announced_is_not_published(world: World, kind: str, gives: str) -> None:
    world.full(1, model())
    pairs = list(model(2).items())
    given = {
        "less": pairs[:-1],
        "more": [*pairs, ("other", torch.ones(3))],
        "twice": [*pairs[:-1], pairs[0]],
        "another order": pairs[::-1],
        "another shape": [(pairs[0][0], pairs[0][1][:1]), *pairs[1:]],
        "another dtype": [(pairs[0][0], pairs[0][1].float()), *pairs[1:]],
    }[gives]
    publish = {
        "full": lambda source: publish_full(world.source, source, version="v2", sequence=2, files_from=world.launch),
        "delta": lambda source: publish_delta(
            world.source, source, version="v2", sequence=2, base=BaseVersion(world.source / "00000001-v1")
        ),
    }[kind]
    with refused(Reason.FIELD_INVALID, field="weights"):
        publish(Otherwise(model(2), given))
    assert [path.name for path in world.source.iterdir()] == ["00000001-v1"]


class Reusing(Otherwise):
    """Has one piece of memory, which every tensor comes in."""

    def __init__(self, weights: Model) -> None:
        super().__init__(weights, list(weights.items()))
        self._memory = torch.empty(max(tensor.nbytes for tensor in weights.values()), dtype=torch.uint8)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors():
            yield name, self._memory[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("compress", [True, False])
def test_a_source_may_use_its_memory_again_for_the_next_tensor(world: World, encoding: str, compress: bool) -> None:
    before, after = ({name: torch.randn(64) + seed for name in "abc"} for seed in (0, 1))  # nothing to compress
    publish_full(world.source, Reusing(before), version="v1", sequence=1, files_from=world.launch)
    settings: dict[str, Any] = {"encoding": encoding, "compress": compress}
    base = BaseVersion(world.source / "00000001-v1")
    publish_delta(world.source, Reusing(after), version="v2", sequence=2, base=base, **settings)
    world.models |= {"v1": before, "v2": after}
    for version in world.models:
        world.pull(version)
        world.check(version)


class Meanwhile(Otherwise):
    """Somebody else publishes while these weights are being written."""

    def __init__(self, weights: Model, publish: Callable[[], object]) -> None:
        super().__init__(weights, list(weights.items()))
        self._publish = publish

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._publish()
        yield from super().tensors()


@pytest.mark.parametrize(("version", "sequence"), [("v2", 2), ("other", 3)])
def test_what_somebody_else_published_meanwhile_counts(world: World, version: str, sequence: int) -> None:
    world.full(1, model())
    source = Meanwhile(model(2), lambda: world.full(3, model(3)))
    with refused(Reason.FIELD_INVALID, "does not follow", "sequence"):
        publish_full(world.source, source, version=version, sequence=sequence, files_from=world.launch)
    assert sorted(path.name for path in world.source.iterdir()) == ["00000001-v1", "00000003-v3"]


@pytest.mark.parametrize("seed", [2, 3])
def test_a_version_that_somebody_else_published_at_the_same_moment_is_not_replaced(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another host, or where there are no locks."""
    sync = atomic_write.sync_directory

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(atomic_write, "sync_directory", sync)
        world.full(2, model(2))
        sync(path)

    world.full(1, model())
    monkeypatch.setattr(atomic_write, "alone", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(atomic_write, "sync_directory", meanwhile)
    with refused(Reason.FIELD_INVALID, "with other weights", "version") if seed == 3 else contextlib.nullcontext():
        publish_full(world.source, model(seed).items(), version="v2", sequence=2, files_from=world.launch)
    world.pull("v2")
    world.check("v2")


@pytest.mark.parametrize("seed", [2, 3])
def test_who_publishes_a_version_while_another_one_writes_it_leaves_what_that_one_writes_alone(
    world: World, seed: int
) -> None:
    world.full(1, model())
    source = Meanwhile(model(seed), lambda: world.full(2, model(2)))
    with refused(Reason.FIELD_INVALID, "with other weights", "version") if seed == 3 else contextlib.nullcontext():
        publish_full(world.source, source, version="v2", sequence=2, files_from=world.launch)
    assert sorted(path.name for path in world.source.iterdir()) == ["00000001-v1", "00000002-v2"]
    world.pull("v2")
    world.check("v2")


def test_versions_get_their_names_one_after_the_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, others = atomic_write.sync_directory, list[Background]()

    def meanwhile(path: Path) -> None:
        monkeypatch.setattr(atomic_write, "sync_directory", sync)
        others.append(Background(lambda: world.full(3, model(3))))
        with pytest.raises(AssertionError, match="it hangs"):
            others[0].result(0.5)
        sync(path)

    world.full(1, model())
    monkeypatch.setattr(atomic_write, "sync_directory", meanwhile)
    world.full(2, model(2))
    others[0].result()
    assert sorted(path.name for path in world.source.iterdir()) == ["00000001-v1", "00000002-v2", "00000003-v3"]


def test_what_was_being_published_by_a_process_that_died_is_removed(world: World) -> None:
    world.full(1, model())
    with atomic_write.building(world.source / "00000002-v2") as held:
        prefix = held.name[: -len("0" * 16)]
        left, begun, elsewhere = (
            world.source / name for name in (f"{prefix}left", f"{prefix}begun", ".x.building-y-z")
        )
        for path in (left, begun, elsewhere):
            path.mkdir()
            (path / "model.safetensors").write_bytes(b"0")
        stray, loop = world.source / f"{prefix}file", world.source / f"{prefix}loop"
        stray.touch()
        loop.symlink_to(loop)
        for path in (held, left, elsewhere):
            os.utime(path, (0, 0))
        world.full(2, model(2))
        assert sorted(world.source.glob(".*")) == sorted([begun, held, elsewhere, stray, loop])


def test_a_build_whose_lock_a_sweep_had_at_first_is_not_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = atomic_write._hold

    def refused_once(fd: int) -> bool | None:
        monkeypatch.undo()
        sweeping = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert hold(sweeping)
        acquired = hold(fd)
        os.close(sweeping)
        return acquired

    monkeypatch.setattr(atomic_write, "_hold", refused_once)
    with atomic_write.building(tmp_path / "00000001-v1") as build:
        os.utime(build, (time.time() - 100,) * 2)
        atomic_write.sweep(tmp_path)
        assert build.exists()
    assert not build.exists()


def test_a_child_that_was_forked_meanwhile_keeps_no_lock(world: World) -> None:
    world.source.mkdir()
    world.local.parent.mkdir()
    soon = Patience(time.monotonic() + 5)
    for held in (atomic_write.alone(world.source, soon), atomic_write.locked(world.local, soon, "x")):
        with held:
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                os.close(writing)
                os.read(reading, 1)
                os._exit(0)
        with atomic_write.alone(world.source, soon), atomic_write.locked(world.local, soon, "x"):
            os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)


def test_a_label_may_be_as_long_as_names_of_directories_leave_room_for(world: World) -> None:
    publish_full(world.source, model().items(), version="v" * 210, sequence=1, files_from=world.launch)
    with refused(Reason.FIELD_INVALID, "no version can be published as", "version"):
        publish_full(world.source, model().items(), version="v" * 211, sequence=2, files_from=world.launch)


def test_a_version_that_is_a_link_is_confirmed(world: World) -> None:
    place = world.full(1, model()).path
    place.rename(world.path / "elsewhere")
    place.symlink_to(world.path / "elsewhere")
    world.full(1, model())
    assert place.is_symlink()


def test_a_base_is_found_beside_another_version_of_its_sequence(world: World) -> None:
    world.chain(2)
    other = publish_full(world.path / "fork", model(7).items(), version="w1", sequence=1, files_from=world.launch)
    shutil.copytree(other.path, world.source / other.path.name)
    world.pull("v2")
    world.check("v2")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    """Another last byte: of the last tensor, or of a text."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("version", "file", "damage", "reason"),
    [
        ("v1", "model-00002-of-00002.safetensors", truncate, Reason.CHECKPOINT_NOT_FOUND),
        ("v1", "model-00002-of-00002.safetensors", Path.unlink, Reason.CHECKPOINT_NOT_FOUND),
        ("v1", "model-00002-of-00002.safetensors", flip, Reason.DIGEST_MISMATCH),
        ("v1", "tokenizer.json", flip, Reason.DIGEST_MISMATCH),
        ("v1", "tokenizer.json", Path.unlink, Reason.CHECKPOINT_NOT_FOUND),
        ("v1", MANIFEST, truncate, Reason.CHECKPOINT_NOT_FOUND),
        ("v1", MANIFEST, lambda path: edit(path, format=2), Reason.CHECKPOINT_NOT_FOUND),
        ("v1", MANIFEST, lambda path: edit(path, digest="0" * 64), Reason.CHECKPOINT_NOT_FOUND),
        ("v1", MANIFEST, lambda path: edit(path, shards={"../x": 1}), Reason.CHECKPOINT_NOT_FOUND),
        ("v2", "delta-00001.safetensors", truncate, Reason.CHECKPOINT_NOT_FOUND),
        ("v2", "delta-00001.safetensors", Path.unlink, Reason.CHECKPOINT_NOT_FOUND),
        ("v2", MANIFEST, Path.unlink, Reason.CHECKPOINT_NOT_FOUND),
    ],
)
@pytest.mark.parametrize("local", [False, True])
def test_damage_is_found_and_leaves_the_local_copy_as_it_was(
    world: World, version: str, file: str, damage: Callable[[Path], Any], reason: Reason, local: bool
) -> None:
    world.chain(2)
    if local:
        other = World(world.path / "other")
        other.full(9, model(9))
        pull(str(other.source), str(world.local), "v9")
    before = snapshot(world.local)
    damage(published(world.source, version).path / file)
    with refused(reason):
        world.pull("v2")
    assert snapshot(world.local) == before
    assert not [path for path in world.local.parent.iterdir() if "building" in path.name]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("compress", [True, False])
def test_a_damaged_delta_is_found_by_its_checksum(world: World, encoding: str, compress: bool) -> None:
    world.full(1, model())
    made = world.delta(2, stepped(model(), 2), encoding=encoding, compress=compress)
    world.pull("v1")
    flip(made.path / "delta-00001.safetensors")
    with pytest.raises(RlctlError) as caught:
        world.pull("v2")
    # Compressed bytes notice by themselves.
    assert caught.value.reason in (Reason.DIGEST_MISMATCH, Reason.CHECKPOINT_NOT_FOUND)
    world.check("v1")


def test_what_engines_would_refuse_to_load_is_not_published(world: World) -> None:
    (world.launch / "config.json").write_text('{"model_type": "llama", "rope_theta": NaN}')
    with refused(Reason.CHECKPOINT_NOT_FOUND, "config.json: it cannot be read: it holds NaN", "files_from"):
        world.full(1, model())
    assert not list(world.source.glob("*"))


@pytest.mark.parametrize("name", ["video.mp4", "config.json"])
def test_what_is_too_large_to_lie_beside_weights_is_neither_read_nor_published(world: World, name: str) -> None:
    with (world.launch / name).open("ab") as file:
        file.truncate(5 << 30)
    with refused(Reason.CHECKPOINT_NOT_FOUND, f"it has 5368709120 bytes.*/{name}", "files_from"):
        world.full(1, model())
    assert not list(world.source.glob("*"))


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_what_has_too_many_tensors_for_a_manifest_that_can_be_read_is_not_published(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "delta":
        world.full(1, model())
        pull(str(world.source), str(world.trainer), "v1")
    before = set(world.source.glob("*"))
    monkeypatch.setattr(publishing, "MOST_BYTES", 1000)
    with refused(Reason.FIELD_INVALID, "its manifest would have [0-9]+ bytes, more than the 1000", "weights"):
        if kind == "full":
            world.full(2, model())
        else:
            base = BaseVersion(world.trainer)
            publish_delta(world.source, model(2).items(), version="v2", sequence=2, base=base)
    assert set(world.source.glob("*")) == before


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json"])
def test_what_has_grown_too_large_to_be_a_manifest_or_to_lie_beside_weights_is_not_pulled(
    world: World, name: str
) -> None:
    with (world.full(1, model()).path / name).open("ab") as file:
        file.truncate(5 << 30)
    with refused(Reason.CHECKPOINT_NOT_FOUND, f"it has 5368709120 bytes.*/{name}", "source_dir"):
        world.pull("v1")
    assert not world.local.exists()


def test_a_manifest_with_nan_is_damaged(world: World) -> None:
    manifest = world.full(1, model()).path / "rlctl-manifest.json"
    manifest.write_text(manifest.read_text().replace('"sequence": 1', '"sequence": NaN'))
    with refused(Reason.CHECKPOINT_NOT_FOUND, "it holds NaN"):
        world.pull("v1")


@pytest.mark.timeout(20)
def test_a_delta_on_itself_is_damaged(world: World) -> None:
    world.chain(2)
    path = published(world.source, "v2").path / MANIFEST
    digest = json.loads(path.read_text())["digest"]
    edit(path, base={"version": "v2", "sequence": 2, "digest": digest})
    with refused(Reason.CHECKPOINT_NOT_FOUND, "its base is version 'v2' .*, which is not before it", "source_dir"):
        world.pull("v2")


@pytest.mark.parametrize(("field", "value"), [("version", 1), ("sequence", "1"), ("version", None)])
def test_a_manifest_without_a_proper_version_is_damaged(world: World, field: str, value: object) -> None:
    edit(world.full(1, model()).path / MANIFEST, **{field: value})
    with refused(Reason.CHECKPOINT_NOT_FOUND, "no manifest that can be read", "source_dir"):
        world.pull("v1")


@pytest.mark.parametrize(
    "fields",
    [
        {"base": {"version": "v1", "sequence": 1, "digest": True}},
        {"base": {"version": None, "sequence": 1, "digest": ""}},
        {"base": {"version": "\ud800", "sequence": 1, "digest": ""}},
        {"version": "\ud800"},
        {"shards": ["delta-00001.safetensors"]},
        {"shards": {"\ud800": 3}},
        {"files": {"a\0b": {"size": 1, "sha256": ""}}},
        {"pulled": "no"},
        {"sequence": True},
        {"sequence": 1 << 64},
        {"base": {"version": "v1", "sequence": 0.5, "digest": ""}},
        {"base": "v1"},
        {"base": None},
        {"shards": {"delta-00001.safetensors": "3"}},
        {"files": {"config.json": 3}},
        {"files": {"config.json": {"size": 2.0, "sha256": ""}}},
        {"files": {"config.json": {"size": 2, "sha256": 0}}},
        {"tensors": []},
        {"tensors": {"a": "float32"}},
    ],
)
def test_a_manifest_whose_fields_are_of_other_types_is_damaged(world: World, fields: dict[str, Any]) -> None:
    world.chain(2)
    edit(published(world.source, "v2").path / MANIFEST, **fields)
    with refused(Reason.CHECKPOINT_NOT_FOUND, "no manifest that can be read", "source_dir"):
        world.pull("v2")


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [16.0]},
        {"shape": ["16"]},
        {"shape": [-16]},
        {"shape": [True]},
        {"shape": ""},
        {"shape": None},
        {"dtype": 3},
        {"sha256": 3},
        {"base_sha256": 3},
    ],
    ids=str,
)
def test_a_manifest_whose_tensors_are_none_is_damaged(world: World, fields: dict[str, Any]) -> None:
    world.chain(2)
    path = published(world.source, "v2").path / MANIFEST
    tensors = json.loads(path.read_text())["tensors"]
    edit(path, tensors={**tensors, "norm.weight": {**tensors["norm.weight"], **fields}})
    with refused(Reason.CHECKPOINT_NOT_FOUND, "no manifest that can be read", "source_dir"):
        read_manifest(path.parent)


def test_a_sequence_that_no_message_holds_is_not_published(world: World) -> None:
    last = world.full((1 << 64) - 1, model())
    roots = Roots([world.path])
    request = PullWeightsRequest(
        source_dir=str(world.source), local_checkpoint_dir=str(world.local), target_version=last.manifest.version
    )
    assert pull_within(roots, request, str(world.launch), Patience()).sequence == last.manifest.sequence
    with refused(Reason.FIELD_INVALID, "no version can be published as 'v18446744073709551616'", "version"):
        world.full(1 << 64, model())


def test_a_published_version_is_no_place_to_pull_into(world: World) -> None:
    world.chain(2)
    first = published(world.source, "v1").path
    with refused(Reason.FIELD_INVALID, "is a published version", "local_checkpoint_dir"):
        pull(str(world.source), str(first), "v2")
    world.pull("v1")
    world.check("v1")


@pytest.mark.parametrize("as_it_is", [True, False])
@pytest.mark.parametrize("name", ["00000007-v7", "renamed"])
def test_what_was_published_elsewhere_is_no_place_to_pull_into_either(world: World, name: str, as_it_is: bool) -> None:
    world.full(1, model())
    other = World(world.path / "other")
    place = other.full(7, model(7)).path.rename(other.source / name)
    if not as_it_is:
        truncate(place / MANIFEST)
    before = snapshot(place)
    for _ in range(2):
        with refused(Reason.FIELD_INVALID, field="local_checkpoint_dir"):
            pull(str(world.source), str(place), "v1")
    assert snapshot(place) == before
    assert list(other.source.iterdir()) == [place]
    if (as_it_is, name) == (True, "00000007-v7"):  # an earlier version of rlctl has left this when it tried
        (other.source / f".{name}.lock").touch()
        with refused(Reason.FIELD_INVALID, "is a published version", "local_checkpoint_dir"):
            pull(str(world.source), str(place), "v1")


def test_a_copy_that_an_earlier_version_of_rlctl_made_is_one(world: World) -> None:
    """Its manifest does not say so, but beside it lies the lock that was taken for it."""
    world.chain(3)
    for version in ("v2", "v3"):
        pulled = world.pull(version)
        assert pulled.changed
        manifest = json.loads((world.local / MANIFEST).read_text())
        assert manifest.pop("pulled") is True
        (world.local / MANIFEST).write_text(json.dumps(manifest))
    assert not world.pull("v3").changed
    world.check("v3")
    assert "pulled" not in json.loads((published(world.source, "v3").path / MANIFEST).read_text())


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_published_within_the_local_directory_is_not_lost(world: World, linked: bool) -> None:
    world.full(1, model())
    world.pull("v1")
    inside = world.local / "published"
    place = publish_full(inside, model(2).items(), version="v2", sequence=2, files_from=world.launch).path
    if linked:
        (world.path / "link").symlink_to(inside)
    with refused(Reason.FIELD_INVALID, "lies within", "source_dir"):
        pull(str(world.path / "link" if linked else inside), str(world.local), "v2")
    assert same(contents(place), model(2))


def test_a_file_is_no_place_to_pull_into(world: World) -> None:
    world.full(1, model())
    world.local.parent.mkdir(parents=True)
    world.local.touch()
    with refused(Reason.FIELD_INVALID, "Not a directory", "local_checkpoint_dir"):
        world.pull("v1")


def test_a_directory_that_holds_another_version_than_its_name_says_is_not_taken_for_it(world: World) -> None:
    world.chain(2)
    first, second = (published(world.source, version).path for version in ("v1", "v2"))
    shutil.copy(second / MANIFEST, first / MANIFEST)
    for version in ("v1", "v2"):  # also as a base
        with refused(Reason.CHECKPOINT_NOT_FOUND, "00000001-v1 holds version 'v2'", "source_dir"):
            world.pull(version)


@pytest.mark.parametrize("what", ["the version", "its base", "a shard", "a file beside", "the local copy"])
def test_no_link_leads_out_of_the_roots(world: World, what: str) -> None:
    world.chain(2)
    roots = Roots([world.source, world.local.parent, world.launch])
    request = PullWeightsRequest(
        source_dir=str(world.source), local_checkpoint_dir=str(world.local), target_version="v2"
    )
    first, second = (published(world.source, version).path for version in ("v1", "v2"))
    linked = {
        "the version": second,
        "its base": first,
        "a shard": second / "delta-00001.safetensors",
        "a file beside": first / "tokenizer.json",
        "the local copy": world.local / "model-00001-of-00002.safetensors",
    }[what]
    if what == "the local copy":
        world.pull("v1")
    elsewhere = world.path / "elsewhere"
    shutil.move(linked, elsewhere)
    linked.symlink_to(elsewhere)
    field = "local_checkpoint_dir" if what == "the local copy" else "source_dir"
    before = snapshot(world.local)
    with refused(Reason.PATH_NOT_ALLOWED, str(elsewhere), field):
        pull_within(roots, request, str(world.launch), Patience())
    assert snapshot(world.local) == before
    linked.unlink()
    shutil.move(elsewhere, linked)
    pull_within(roots, request, str(world.launch), Patience())
    world.check("v2")


def test_a_damaged_local_copy_is_told_from_a_damaged_delta(world: World) -> None:
    world.chain(2)
    world.pull("v1")
    flip(world.local / "model-00001-of-00002.safetensors")
    with refused(Reason.DIGEST_MISMATCH, f"before: in {world.local}"):
        world.pull("v2")
    # One that is visibly not whole is made anew.
    truncate(world.local / "model-00001-of-00002.safetensors")
    assert world.pull("v2").deltas == 1
    world.check("v2")


@pytest.mark.parametrize("what", ["pull", "full", "delta"])
def test_a_directory_that_cannot_be_looked_at_is_refused(world: World, what: str) -> None:
    world.full(1, model())
    pull(str(world.source), str(world.trainer), "v1")
    world.source /= "x" * 300
    reason = Reason.CHECKPOINT_NOT_FOUND if what == "pull" else Reason.FIELD_INVALID
    with refused(reason, "File name too long", "source_dir"):
        if what == "pull":
            world.pull("v1")
        elif what == "full":
            world.full(2, model(2))
        else:
            base = BaseVersion(world.trainer)
            publish_delta(world.source, model(2).items(), version="v2", sequence=2, base=base)
    assert not world.local.exists()


def test_no_delta_to_a_damaged_copy_is_published(world: World) -> None:
    world.full(1, model())
    pull(str(world.source), str(world.trainer), "v1")
    flip(world.trainer / "model-00001-of-00002.safetensors")
    base = BaseVersion(world.trainer)
    with refused(Reason.DIGEST_MISMATCH, f"the files of {world.trainer} differ from its manifest", "base"):
        publish_delta(world.source, model(2).items(), version="v2", sequence=2, base=base)
    assert [path.name for path in world.source.iterdir()] == ["00000001-v1"]


@pytest.mark.parametrize("sequence", [4, 5])
def test_a_delta_that_does_not_come_after_its_base_is_not_published(world: World, sequence: int) -> None:
    base = BaseVersion(world.full(5, model()).path)
    with refused(Reason.FIELD_INVALID, f"sequence {sequence} does not follow its base.*5", "sequence"):
        publish_delta(world.path / "other", model(2).items(), version="v", sequence=sequence, base=base)
    assert not list((world.path / "other").glob("*"))


def test_a_delta_on_another_base_is_refused(world: World) -> None:
    world.chain(3)
    other = World(world.path / "other")
    other.full(1, model())
    other.delta(2, stepped(model(), 77))
    shutil.rmtree(published(world.source, "v2").path)
    shutil.copytree(published(other.source, "v2").path, world.source / "00000002-v2")
    world.pull("v1")
    with refused(Reason.CHECKPOINT_MISMATCH, "is a difference to 'v2'", "source_dir"):
        world.pull("v3")
    world.check("v1")


def test_a_directory_that_was_not_pulled_is_not_replaced(world: World) -> None:
    world.full(1, model())
    world.local.mkdir(parents=True)
    world.pull("v1")
    world.check("v1")
    shutil.rmtree(world.local)
    world.local.mkdir()
    (world.local / "thesis.txt").write_text("years of work")
    with refused(Reason.FIELD_INVALID, "were not pulled", "local_checkpoint_dir"):
        world.pull("v1")
    assert (world.local / "thesis.txt").exists()


FULL = """
import resource, sys, signal
from rlctl.contract.errors import RlctlError
from rlctl.weights.versions.pull import pull
from rlctl.weights.versions.publish import publish_full
import torch
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    if sys.argv[1] == "pull":
        pull(*sys.argv[2:5])
    else:
        publish_full(sys.argv[2], [("w", torch.ones(10_000))], version="v9", sequence=9, files_from=sys.argv[3])
except RlctlError as error:
    print(error.reason.name, error.field)
"""


@pytest.mark.parametrize("what", ["pull", "publish"])
def test_a_full_disk_is_typed_and_leaves_everything_as_it_was(world: World, what: str) -> None:
    """The limit on a file's size stands in for a disk that is too small: the system refuses to write on."""
    world.full(1, model())
    world.pull("v1")
    world.full(2, {"w": torch.ones(10_000)})
    before = snapshot(world.source / "00000002-v2"), snapshot(world.local), sorted(world.source.iterdir())
    arguments = [world.source, world.local, "v2"] if what == "pull" else [world.source, world.launch]
    done = subprocess.run(
        [sys.executable, "-c", FULL, what, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["DISK_FULL", "local_checkpoint_dir" if what == "pull" else "source_dir"], done.stderr
    assert (snapshot(world.source / "00000002-v2"), snapshot(world.local), sorted(world.source.iterdir())) == before
    world.check("v1")


@pytest.mark.parametrize("at", ["create", "write_at", "sync", "write_file", "sync_directory", "rename", "exchange"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_whatever_cannot_be_written_is_typed(
    world: World, monkeypatch: pytest.MonkeyPatch, at: str, number: int
) -> None:
    world.chain(2)
    world.pull("v1")
    if at == "rename":
        monkeypatch.setattr(atomic_write, "exchange", lambda *_: False)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(atomic_write, at, fail)
    reason = Reason.FIELD_INVALID if number == errno.EIO else Reason.DISK_FULL
    with refused(reason, os.strerror(number), "local_checkpoint_dir"):
        world.pull("v2")
    monkeypatch.undo()
    world.check("v1")
    world.pull("v2")
    world.check("v2")


def test_a_copy_that_was_moved_aside_for_a_new_one_that_cannot_come_is_moved_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on network file systems, where two directories cannot swap names."""
    world.chain(2)
    world.pull("v1")
    monkeypatch.setattr(atomic_write, "exchange", lambda *_: False)
    rename = atomic_write.rename

    def failing(old: Path, new: Path) -> None:
        if new == world.local and not new.exists() and "building" in old.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(atomic_write, "rename", failing)
    with refused(Reason.FIELD_INVALID, os.strerror(errno.EIO), "local_checkpoint_dir"):
        world.pull("v2")
    world.check("v1")
    monkeypatch.setattr(atomic_write, "rename", rename)
    world.pull("v2")
    world.check("v2")


class Crash(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


STEPS = ("create", "write_at", "sync", "write_file", "sync_directory", "building", "rename", "exchange", "discard")


@contextmanager
def crashing(after: int, *, exchange: bool = True) -> Iterator[list[str]]:
    """Everything that touches the disk fails from the given step on, cleaning up too."""
    taken: list[str] = []
    lock = threading.Lock()
    patch = pytest.MonkeyPatch()

    def wrap(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def taking(*args: Any) -> Any:
            with lock:
                if len(taken) >= after:
                    raise Crash
                taken.append(name)
            return step(*args)

        return taking

    for name in STEPS:
        step = getattr(atomic_write, name) if exchange or name != "exchange" else lambda *_: False
        patch.setattr(atomic_write, name, wrap(name, step))
    try:
        yield taken
    finally:
        patch.undo()


@pytest.mark.parametrize("exchange", [True, False])
def test_a_crash_at_any_step_leaves_one_version_or_the_other(world: World, exchange: bool) -> None:
    world.chain(3)
    world.pull("v1")
    with crashing(10_000, exchange=exchange) as steps:
        world.pull("v3")
    assert set(steps) >= {"create", "write_at", "sync_directory", "exchange", "discard"}
    for after in range(len(steps)):
        shutil.rmtree(world.local)
        world.pull("v1")
        with crashing(after, exchange=exchange), pytest.raises(Crash):
            world.pull("v3")
        if world.local.exists():
            assert same(contents(world.local), world.models["v1"]) or same(contents(world.local), world.models["v3"])
        else:
            assert not exchange, "without the system's exchange there is a moment without either"
        world.pull("v3")
        world.check("v3")


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What happens, one after the other: (publish how | pull | crash, a number, another one)."""
    kinds = st.sampled_from(["full", "xor", "overwrite", "pull", "pull", "crash", "crash publishing"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 1000), st.integers(0, 60)), min_size=1, max_size=12))


@given(history=histories())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_versions_pulls_and_crashes_is_bit_exact(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, int]]
) -> None:
    world = World(tmp_path_factory.mktemp("world"))
    weights, latest = model(), 1
    world.full(1, weights)
    for what, seed, step in history:
        if what in ("pull", "crash"):
            version = f"v{1 + seed % latest}"
            if what == "crash":
                with crashing(step), contextlib.suppress(Crash):
                    world.pull(version)
            world.pull(version)
            world.check(version)
            continue
        weights, latest = stepped(weights, seed), latest + 1

        def publish(how: str = what, sequence: int = latest, weights: Model = weights) -> None:
            if how == "full":
                world.full(sequence, weights)
            else:
                world.delta(sequence, weights, encoding="overwrite" if how == "overwrite" else "xor")

        if what == "crash publishing":
            pull(str(world.source), str(world.trainer), f"v{latest - 1}")
            with crashing(step), contextlib.suppress(Crash):
                publish()
        publish()
    for version in world.models:
        world.pull(version)
        world.check(version)
    shutil.rmtree(world.path)


def test_those_who_pull_at_the_same_time_take_turns_and_one_does_it(world: World) -> None:
    world.chain(3)
    jobs = [Background(lambda: world.pull("v3")) for _ in range(4)]
    assert sorted(job.result().changed for job in jobs) == [False, False, False, True]
    world.check("v3")


@pytest.mark.parametrize("how", ["deadline", "stop"])
def test_whoever_waits_for_another_gives_up_in_time(world: World, how: str) -> None:
    world.full(1, model())
    world.local.parent.mkdir(parents=True)
    stop = threading.Event()
    with atomic_write.locked(world.local, Patience(), "x"):
        started = time.monotonic()
        limit = started + 0.2 if how == "deadline" else float("inf")
        waiting = Background(lambda: world.pull("v1", patience=Patience(limit, stop)))
        if how == "stop":
            stop.set()
        with refused(
            Reason.DEADLINE_EXCEEDED if how == "deadline" else Reason.CANCELLED, "another process held the lock"
        ):
            waiting.result()
        assert time.monotonic() - started < 1.0
    world.pull("v1")
    world.check("v1")


def test_a_pull_whose_time_is_up_leaves_the_local_copy_as_it_was(world: World) -> None:
    world.chain(2)
    world.pull("v1")
    with refused(Reason.DEADLINE_EXCEEDED, "before everything was pulled"):
        world.pull("v2", patience=Patience(time.monotonic()))
    world.check("v1")


def test_a_lock_is_free_when_its_holder_dies(world: World) -> None:
    world.full(1, model())
    world.local.parent.mkdir(parents=True)
    code = (
        "import sys, time; from pathlib import Path; from rlctl.weights.checkpoint.atomic_write import *\n"
        "with locked(Path(sys.argv[1]), Patience(), 'x'): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(world.local)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            with refused(Reason.DEADLINE_EXCEEDED):
                world.pull("v1", patience=Patience(time.monotonic() + 0.1))
        finally:
            holder.kill()
    world.pull("v1")
    world.check("v1")
