"""Pulling versions in slime's layout: the copy is what the trainer published, bit for bit, or nothing changes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from slime_publisher import SlimePublisher, checksum
from weights_helpers import digest_of

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import PullWeightsRequest
from rlctl.weights.checkpoint.allowed_roots import Roots
from rlctl.weights.checkpoint.atomic_write import Patience
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.versions import slime_layout
from rlctl.weights.versions.manifest import read_manifest
from rlctl.weights.versions.publish import publish_full
from rlctl.weights.versions.pull import Pulled, pull, pull_within

Model = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def model(seed: int = 0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(40, 16, generator=generator).to(torch.bfloat16),
        "norm.weight": torch.randn(16, generator=generator),
        "scale": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3),
        "head.weight": torch.randn(16, 40, generator=generator).to(torch.bfloat16),
    }


def stepped(before: Model, seed: int) -> Model:
    """Some elements of two tensors are others; the rest is the same."""
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("embed.weight", "norm.weight"):
        after[name][torch.rand(after[name].shape, generator=generator) < 0.3] += 1
    return after


def write_checkpoint(path: Path, weights: Model) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    save_torch(weights, path / "model.safetensors", {"format": "pt"})
    return path


class World:
    """An engine's checkpoint, a trainer of slime, and the engine's local directory."""

    def __init__(self, path: Path, encoding: str = "xor", kind: str = "xxh3-128") -> None:
        self.path = path
        self.encoding, self.kind = encoding, kind
        self.models = [model()]
        self.base = write_checkpoint(path / "base", model())
        self.local = path / "host" / "actor"
        self.source = path / "published"
        self.start()

    def start(self) -> None:
        """The trainer starts: it clears what an earlier run has published."""
        shutil.rmtree(self.source, ignore_errors=True)
        self.models = self.models[:1]
        self.trainer = SlimePublisher(self.source, self.models[0], encoding=self.encoding, kind=self.kind)

    def delta(self, weights: Model | None = None) -> Path:
        self.models.append(weights or stepped(self.models[-1], len(self.models)))
        return self.trainer.delta(self.models[-1])

    def full(self, weights: Model) -> Path:
        self.models.append(weights)
        return self.trainer.full(write_checkpoint(self.path / f"saved-{len(self.models)}", weights), weights)

    def pull(self, number: int) -> Pulled:
        return pull(str(self.source), str(self.local), str(number), base_dir=str(self.base))

    def check(self, number: int) -> None:
        checkpoint = open_checkpoint(str(self.local))
        expected = self.models[number]
        assert checkpoint.metas.keys() == expected.keys()
        assert all(torch.equal(checkpoint.read(name), expected[name]) for name in expected)
        manifest = read_manifest(self.local)
        assert manifest is not None
        assert (manifest.version, manifest.sequence) == (str(number), number)
        assert manifest.digest == digest_of(expected)
        assert (self.local / "tokenizer.json").read_text() == "{}"
        assert sorted(path.name for path in self.local.parent.iterdir()) == [".actor.lock", "actor"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@contextlib.contextmanager
def refused(reason: Reason, words: str, field: str = "source_dir") -> Iterator[None]:
    with pytest.raises(RlctlError, match=words) as caught:
        yield
    assert (caught.value.reason, caught.value.field) == (reason, field), caught.value
    assert caught.value.next_step


def edit(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], object]) -> None:
    """Write a delta's file anew, with what it stores or the checksums changed."""
    with safe_open(path, "numpy") as file:
        stored, sums = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(stored, sums)
    save_file(stored, path, sums)


def holder(version: Path, name: str) -> Path:
    return version / json.loads((version / INDEX).read_text())["weight_map"][name]


def packed(plain: bytes) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(plain), np.uint8)


@pytest.mark.parametrize("kind", ["xxh3-128", "blake3", "adler32"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_chain_is_replayed_from_the_engines_own_checkpoint(tmp_path: Path, encoding: str, kind: str) -> None:
    world = World(tmp_path, encoding, kind)
    assert world.pull(0).deltas == 0
    world.check(0)
    for _ in range(3):
        world.delta()
    pulled = world.pull(1)
    assert (pulled.changed, pulled.deltas) == (True, 1)
    world.check(1)
    assert world.pull(3).deltas == 2
    world.check(3)
    assert not world.pull(3).changed
    assert world.pull(2).deltas == 2  # back: from the start
    world.check(2)
    shutil.rmtree(world.local)
    assert world.pull(3).deltas == 3
    world.check(3)


def test_a_complete_version_starts_the_chain_anew(world: World) -> None:
    world.delta()
    world.full(model(5))
    world.delta()
    shutil.rmtree(world.trainer.path(1))
    assert world.pull(3).deltas == 1
    world.check(3)
    assert world.pull(2).deltas == 0
    world.check(2)
    assert not world.pull(2).changed


def test_a_complete_version_needs_no_checkpoint_of_the_engine(world: World) -> None:
    world.full(model(5))
    pull(str(world.source), str(world.local), "1", base_dir="a/name")
    world.check(1)


def test_a_complete_version_without_a_config_is_refused(world: World) -> None:
    (world.full(model(5)) / "config.json").unlink()
    with pytest.raises(RlctlError, match=r"weight_v000001 holds no config.json") as caught:
        world.pull(1)
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_NOT_FOUND, "source_dir")
    assert not world.local.exists()


def test_a_version_without_changes_is_pulled(world: World) -> None:
    world.delta(model())
    assert world.pull(1).deltas == 1
    world.check(1)


def test_versions_before_the_local_copys_may_be_gone(world: World) -> None:
    for _ in range(3):
        world.delta()
    world.pull(2)
    shutil.rmtree(world.trainer.path(1))
    assert world.pull(3).deltas == 1
    world.check(3)


@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_of_an_earlier_runs_version_is_no_base(world: World, first: int) -> None:
    """A tensor that only the earlier run changed has no checksum in the later run's delta."""
    earlier = stepped(model(), 7)
    earlier["head.weight"] = earlier["head.weight"] + 1
    world.delta(earlier)
    world.delta()
    world.pull(1)
    world.start()
    if first == 0:
        world.pull(0)  # as slime's trainers begin
        world.check(0)
    world.delta()
    world.delta()
    world.pull(2)
    world.check(2)


def test_a_copy_that_began_at_another_checkpoint_of_the_engine_is_no_base(world: World) -> None:
    other = {**model(), "head.weight": model(3)["head.weight"]}
    right, world.base = world.base, write_checkpoint(world.path / "other", other)
    world.delta()
    world.delta()
    world.pull(1)  # head.weight has no checksum
    world.base = right
    world.pull(2)
    world.check(2)


def test_a_missing_base_is_named(world: World) -> None:
    for _ in range(3):
        world.delta()
    world.pull(1)
    shutil.rmtree(world.trainer.path(2))
    with refused(Reason.CHECKPOINT_NOT_FOUND, "weight_v000003 is a difference to version 2, .*weight_v000002 is not"):
        world.pull(3)
    world.check(1)
    with pytest.raises(RlctlError, match="version '9' is not published") as caught:
        world.pull(9)
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_NOT_FOUND, "target_version")
    with refused(Reason.CHECKPOINT_NOT_FOUND, "version 0, the checkpoint that the engine was started with"):
        pull(str(world.source), str(world.local), "1")
    world.check(1)


def wrong_base(world: World) -> None:
    shutil.rmtree(world.base)
    write_checkpoint(world.base, model(9))


def other_tensors(world: World) -> None:
    shutil.rmtree(world.base)
    write_checkpoint(world.base, {name: tensor for name, tensor in model().items() if name != "norm.weight"})


def flip(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["embed.weight"] = packed(bytes(40 * 16 * 2))

    edit(holder(world.trainer.path(1), "embed.weight"), change)


def no_checksum(world: World) -> None:
    edit(holder(world.trainer.path(1), "embed.weight"), lambda _, sums: sums.pop("embed.weight"))


def garbage(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["embed.weight"] = np.frombuffer(b"no frame of zstd", np.uint8)

    edit(holder(world.trainer.path(1), "embed.weight"), change)


def cut_frame(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["embed.weight"] = stored["embed.weight"][:-9].copy()

    edit(holder(world.trainer.path(1), "embed.weight"), change)


def huge_frame(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["embed.weight"] = packed(bytes(64 << 20))

    edit(holder(world.trainer.path(1), "embed.weight"), change)


def many_bytes(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["norm.weight"] = np.zeros(1 << 16, np.uint8)

    edit(holder(world.trainer.path(1), "norm.weight"), change)


def other_dtype(world: World) -> None:
    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["norm.weight"] = np.zeros(16, np.float32)

    edit(holder(world.trainer.path(1), "norm.weight"), change)


def cut_file(world: World) -> None:
    path = holder(world.trainer.path(1), "embed.weight")
    os.truncate(path, path.stat().st_size - 1)


def no_file(world: World) -> None:
    holder(world.trainer.path(1), "embed.weight").unlink()


@pytest.mark.parametrize(
    ("harm", "reason", "words"),
    [
        (wrong_base, Reason.DIGEST_MISMATCH, "does not match its checksum after .*weight_v000001"),
        (other_tensors, Reason.CHECKPOINT_MISMATCH, r"changes 1 tensors that .*base does not hold \(norm.weight\)"),
        (flip, Reason.DIGEST_MISMATCH, "embed.weight does not match its checksum after .*weight_v000001"),
        (no_checksum, Reason.CHECKPOINT_NOT_FOUND, "embed.weight is damaged: .* has no checksum"),
        (garbage, Reason.CHECKPOINT_NOT_FOUND, "embed.weight is damaged: zstd"),
        (cut_frame, Reason.CHECKPOINT_NOT_FOUND, "embed.weight is damaged: it ends"),
        (huge_frame, Reason.CHECKPOINT_NOT_FOUND, "embed.weight is damaged: there are more bytes"),
        (many_bytes, Reason.CHECKPOINT_NOT_FOUND, "norm.weight is damaged: 65536 bytes are stored"),
        (other_dtype, Reason.CHECKPOINT_NOT_FOUND, "norm.weight is damaged: it is stored as torch.float32"),
        (cut_file, Reason.CHECKPOINT_NOT_FOUND, "its header promises"),
        (no_file, Reason.CHECKPOINT_NOT_FOUND, "no such file"),
    ],
)
def test_a_damaged_delta_or_one_that_does_not_fit_changes_nothing(
    world: World, harm: Callable[[World], None], reason: Reason, words: str
) -> None:
    world.delta()
    world.delta()
    harm(world)
    for number in (1, 2):
        with pytest.raises(RlctlError, match=words) as caught:
            world.pull(number)
        assert (caught.value.reason, caught.value.field) == (reason, "source_dir"), caught.value
        assert not world.local.exists()


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (b"\x01\x00\x00", "it ends 1 bytes early"),
        ((1 << 31).to_bytes(4, "little"), "2147483648 positions in a tensor of 64 bytes"),
        (np.array([1, 64], "<u4").tobytes() + b"x", "its positions do not ascend within a tensor of 64 bytes"),
        (np.array([2, 5, 5], "<u4").tobytes() + b"xx", "its positions do not ascend"),
        (np.array([2, 5, 6], "<u4").tobytes() + b"x", "it ends 1 bytes early"),
        (np.array([1, 5], "<u4").tobytes() + b"xx", "there are more bytes"),
    ],
)
def test_an_overwrite_is_applied_within_its_tensor_only(tmp_path: Path, plain: bytes, words: str) -> None:
    world = World(tmp_path, "overwrite")

    def change(stored: dict[str, np.ndarray], _: dict[str, str]) -> None:
        stored["norm.weight"] = packed(plain)

    edit(holder(world.delta(), "norm.weight"), change)
    with refused(Reason.CHECKPOINT_NOT_FOUND, words):
        world.pull(1)
    assert not world.local.exists()


@pytest.mark.parametrize(
    ("name", "value", "reason", "words"),
    [
        ("version", "000002", Reason.CHECKPOINT_NOT_FOUND, "metadata.version is 2, its directory is version 1"),
        ("version", "one", Reason.CHECKPOINT_NOT_FOUND, "metadata.version is 'one', which is no number"),
        ("base_version", "000001", Reason.CHECKPOINT_NOT_FOUND, "metadata.base_version is 1, which is not before"),
        ("base_version", None, Reason.CHECKPOINT_NOT_FOUND, "its metadata has no base_version"),
        ("base_version", 0, Reason.CHECKPOINT_NOT_FOUND, "0 is no text"),
        ("delta_encoding", "sub", Reason.UNSUPPORTED, "metadata.delta_encoding is 'sub'"),
        ("compression_format", "lz4", Reason.UNSUPPORTED, "metadata.compression_format is 'lz4'"),
        ("checksum_format", "md5", Reason.UNSUPPORTED, "metadata.checksum_format is 'md5'"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(
    world: World, name: str, value: object, reason: Reason, words: str
) -> None:
    index = world.delta() / INDEX
    body = json.loads(index.read_text())
    body["metadata"] = {key: text for key, text in (body["metadata"] | {name: value}).items() if text is not None}
    index.write_text(json.dumps(body))
    with refused(reason, words):
        world.pull(1)
    assert not world.local.exists()


@pytest.mark.parametrize("text", ["[]", '{"metadata": []}', "{", '{"metadata": null}'])
def test_an_index_that_is_none_is_refused(world: World, text: str) -> None:
    (world.delta() / INDEX).write_text(text)
    with refused(Reason.CHECKPOINT_NOT_FOUND, "weight_v000001/model.safetensors.index.json: it cannot be read"):
        world.pull(1)


@pytest.mark.parametrize("package", ["zstandard", "xxhash"])
def test_a_missing_package_names_the_extra(world: World, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    world.delta()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RlctlError, match=f"need the package {package}") as caught:
        world.pull(1)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "source_dir")
    assert caught.value.next_step == "pip install 'rlctl[torch]'"
    assert not world.local.exists()


def test_a_version_that_is_rewritten_while_it_is_read_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.full(model(5))
    find = slime_layout.find

    def racing(*arguments: object) -> object:
        found = find(*arguments)  # type: ignore[arg-type]
        save_torch(model(6), path / "model.safetensors", {"format": "pt"})
        os.utime(path / "model.safetensors", ns=(1, 1))
        return found

    monkeypatch.setattr(slime_layout, "find", racing)
    with refused(Reason.CHECKPOINT_NOT_FOUND, "changed while they were read"):
        world.pull(1)
    assert not world.local.exists()


def test_the_engines_own_checkpoint_is_not_replaced_by_what_begins_at_it(world: World) -> None:
    world.delta()
    world.pull(1)
    world.base = world.local  # the engine was started again, with the copy
    world.delta()
    shutil.rmtree(world.trainer.path(1))
    before = {path.name: path.read_bytes() for path in world.local.iterdir()}
    with refused(Reason.FIELD_INVALID, "which the engine was started with, lies within", "local_checkpoint_dir"):
        world.pull(0)
    with refused(Reason.CHECKPOINT_NOT_FOUND, "version 1, which is not published"):
        world.pull(2)
    assert {path.name: path.read_bytes() for path in world.local.iterdir()} == before


def test_version_0_is_the_engines_checkpoint_only_where_the_layout_may_be_slimes(world: World) -> None:
    source = world.path / "ours"
    publish_full(source, model().items(), version="7", sequence=7, files_from=world.base)
    with pytest.raises(RlctlError, match="version '0' is not published"):
        pull(str(source), str(world.local), "0", base_dir=str(world.base))
    # A version of the project's layout comes before one of slime's.
    pulled = pull(str(source), str(world.local), "7", base_dir=str(world.base))
    assert pulled.manifest.origin == ()


def test_no_link_in_a_version_leads_out_of_the_roots(world: World) -> None:
    version = world.delta()
    file = holder(version, "embed.weight")
    shutil.move(file, world.path / "elsewhere")
    file.symlink_to(world.path / "elsewhere")
    roots = Roots([world.source, world.local.parent, world.base])
    request = PullWeightsRequest(
        source_dir=str(world.source), local_checkpoint_dir=str(world.local), target_version="1"
    )
    with pytest.raises(RlctlError, match=re.escape(str(world.path / "elsewhere"))) as caught:
        pull_within(roots, request, str(world.base), Patience())
    assert (caught.value.reason, caught.value.field) == (Reason.PATH_NOT_ALLOWED, "source_dir")


def test_a_pull_whose_time_is_up_leaves_the_local_copy_as_it_was(world: World) -> None:
    world.delta()
    world.pull(0)
    with pytest.raises(RlctlError) as caught:
        pull(
            str(world.source),
            str(world.local),
            "1",
            base_dir=str(world.base),
            patience=Patience(time.monotonic()),
        )
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    world.check(0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("xxh3-128", "06b05ab6733a618578af5f94892f3950"),
        ("blake3", "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"),
        ("adler32", "024d0127"),
    ],
)
def test_the_checksums_are_those_of_the_published_vectors(kind: str, expected: str) -> None:
    assert checksum(kind, b"abc") == expected
