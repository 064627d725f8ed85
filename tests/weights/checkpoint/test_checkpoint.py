"""Reading checkpoints, and everything that can be wrong with one."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights_helpers import files_left, full_model, tp_map

from rlctl.contract.errors import NotFound, PreconditionFailed, Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.weights.checkpoint.checkpoint import Checkpoint, compare, open_checkpoint
from rlctl.weights.checkpoint.safetensors_file import TensorFile
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.tensors import TensorMeta

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "d": torch.tensor([True, False]),
    "scalar": torch.tensor(3.0, dtype=torch.float16),
    "empty": torch.empty(0, 2, dtype=torch.int8),
    "wide": torch.arange(8, dtype=torch.int64),
}


def write(path: Path, tensors: Mapping[str, torch.Tensor] = TENSORS, *, files: int = 0) -> str:
    """A checkpoint of one file, or of several with an index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    if not files:
        save_file(dict(tensors), path / "model.safetensors")
        return str(path)
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::files]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(path)


def refusal(path: str | Path) -> str:
    with pytest.raises(NotFound) as caught:
        open_checkpoint(str(path), field="request.model_path")
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    assert caught.value.field == "request.model_path"
    assert str(path) in caught.value.message
    return caught.value.message


def edit_index(path: str, name: str, file: str | None) -> None:
    index = Path(path, "model.safetensors.index.json")
    content = json.loads(index.read_text())
    if file is None:
        del content["weight_map"][name]
    else:
        content["weight_map"][name] = file
    index.write_text(json.dumps(content))


@pytest.mark.parametrize("files", [0, 1, 3])
def test_tensors_are_read_as_they_were_written(tmp_path: Path, files: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path, files=files))
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.metas == {name: TensorMeta.of(name, tensor) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            read.view(torch.uint8) if read.dim() else read, tensor.view(torch.uint8) if tensor.dim() else tensor
        )


def slice_of(checkpoint: Checkpoint, name: str, part: Slice) -> torch.Tensor:
    meta = checkpoint.metas[name]
    tensor = torch.empty(part.shape(meta.shape), dtype=meta.dtype)
    checkpoint.read_into([(name, part, tensor)])
    return tensor


@pytest.mark.parametrize("files", [0, 3])
@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 2), (0, 0, 0), (1, 1, 2), (1, 3, 1), (1, 0, 4)])
def test_a_slice_is_read_as_it_stands_in_the_tensor(
    tmp_path: Path, files: int, dim: int, start: int, length: int
) -> None:
    read = slice_of(open_checkpoint(write(tmp_path, files=files)), "a", Slice(dim, start, length))
    assert torch.equal(read, TENSORS["a"].narrow(dim, start, length))


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    whole, part = checkpoint.read("a"), slice_of(checkpoint, "a", Slice(0, 1, 1))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(-file.stat().st_size // 2, os.SEEK_END)
        raw.write(b"\xff" * (file.stat().st_size // 2))
    assert torch.equal(whole, TENSORS["a"])
    assert torch.equal(part, TENSORS["a"][1:2])


@pytest.mark.parametrize("change", ["rewritten", "cut short", "removed"])
def test_a_file_that_changes_after_it_was_opened_is_not_read(tmp_path: Path, change: str) -> None:
    # Larger than a page of memory: reading past the end of a mapped file would kill the process.
    checkpoint = open_checkpoint(write(tmp_path, {"a": torch.ones(1 << 16)}))
    file = tmp_path / "model.safetensors"
    if change == "rewritten":
        write(tmp_path, {"a": torch.zeros(1 << 16)})
        os.utime(file, ns=(1, 1))
    elif change == "cut short":
        os.truncate(file, 100)
    else:
        file.unlink()
    with pytest.raises(NotFound, match="changed or removed"):
        checkpoint.read("a")


def test_a_closed_checkpoint_and_an_unknown_tensor_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path))
    with pytest.raises(NotFound, match="no tensor 'z'"):
        checkpoint.read("z")
    checkpoint.close()
    with pytest.raises(NotFound, match="closed"):
        checkpoint.read("a")


def test_a_missing_directory_config_or_weights_is_refused(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "nowhere")
    path = write(tmp_path / "c")
    shutil.move(Path(path, "model.safetensors"), Path(path, "other.safetensors"))
    assert "neither model.safetensors nor" in refusal(path)
    Path(path, "config.json").unlink()
    assert "config.json" in refusal(path)


NESTED = b"[" * 100_000


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", NESTED])
def test_an_unreadable_config_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path)
    Path(path, "config.json").write_bytes(content)
    assert "config.json" in refusal(path)


def test_a_config_with_nan_is_refused_and_one_with_infinity_is_not(tmp_path: Path) -> None:
    path = write(tmp_path)
    Path(path, "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    open_checkpoint(path).close()
    Path(path, "config.json").write_text('{"model_type": "llama", "rope_theta": NaN}')
    assert "NaN" in refusal(path)


@pytest.mark.parametrize(
    ("header", "cause"),
    [
        (NESTED, "nested too deep"),
        (b'{"a": {"dtype": [], "shape": [2], "data_offsets": [0, 8]}}', "a has dtype"),
        (b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}', "a has no proper shape"),
        (b'{"a": {"dtype": "F64", "shape": "", "data_offsets": [0, 8]}}', "a has no proper shape"),
        (b'{"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}', "a has 8 bytes instead of 16"),
        (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            "b begins at byte 4 of the tensors, 8 comes next",
        ),
        (b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "surrogates not allowed"),
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes, cause: str) -> None:
    path = write(tmp_path)
    Path(path, "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert cause in refusal(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, files=2 if "index" in name else 0)
    Path(path, name).unlink()
    os.mkfifo(Path(path, name))
    assert f"{name}: it cannot be read: [Errno 22] it is no regular file" in refusal(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_is_too_large_to_be_a_config_or_an_index_is_not_read(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model", files=2)
    with (tmp_path / "model" / name).open("r+b") as file:
        file.truncate(5 << 30)
    cause = refusal(path)
    assert name in cause
    assert "it has 5368709120 bytes" in cause


@pytest.mark.parametrize("files", [0, 2])
@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path, files: int, size: int) -> None:
    path = write(tmp_path, files=files)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
    assert file.name in refusal(path)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, files=2)
    Path(path, "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: there is no such file" in refusal(path)


@pytest.mark.parametrize("content", ['{"weight_map": 3}', "{}", '{"weight_map": {"a": 1}}', "no json"])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, files=2)
    Path(path, "model.safetensors.index.json").write_text(content)
    assert "index.json" in refusal(path)


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("a", None, "holds a, against the index"),
        ("a", "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors holds a, against the index"),
        ("z", "model-00001-of-00002.safetensors", "does not hold z"),
        ("z", "../model.safetensors", "no file of this directory"),
        ("z", "", "no file of this directory"),
        ("z", "model-2.bin", r"is not called \*.safetensors"),
        ("z", ".model-2.safetensors", r"is not called \*.safetensors"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_a_mismatch(
    tmp_path: Path, name: str, file: str | None, message: str
) -> None:
    path = write(tmp_path, files=2)
    edit_index(path, name, file)
    with pytest.raises(PreconditionFailed, match=message) as caught:
        open_checkpoint(path)
    assert caught.value.reason is Reason.CHECKPOINT_MISMATCH


def old_index(path: Path, *, shards: bool) -> None:
    """Leave the index of an earlier, sharded checkpoint beside a single file."""
    write(path, {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, files=2)
    for shard in [] if shards else path.glob("model-*"):
        shard.unlink()


@pytest.mark.parametrize(
    ("files", "further"),
    [
        (0, "model-00001-of-00002.safetensors"),
        (0, "consolidated.safetensors"),
        (0, "adapter_model.safetensors"),
        (0, "consolidated.safetensors.index.json"),
        (2, "model.safetensors"),
        (2, "model-00003-of-00003.safetensors"),
        (2, "consolidated.safetensors"),
        (2, "mtp.safetensors"),
    ],
)
def test_a_directory_with_further_safetensors_files_is_a_mismatch(tmp_path: Path, files: int, further: str) -> None:
    path = write(tmp_path, files=files)
    save_file({"a": torch.zeros(3, 4)}, tmp_path / further)
    with pytest.raises(PreconditionFailed, match=further) as caught:
        open_checkpoint(path, field="request.model_path")
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_MISMATCH, "request.model_path")
    assert "Remove the files" in caught.value.next_step


@pytest.mark.parametrize("shards", [True, False])
def test_a_single_file_beside_an_old_index_is_a_mismatch(tmp_path: Path, shards: bool) -> None:
    path = write(tmp_path)
    old_index(tmp_path, shards=shards)
    with pytest.raises(PreconditionFailed, match=r"index\.json does not name: model\.safetensors") as caught:
        open_checkpoint(path)
    assert caught.value.reason is Reason.CHECKPOINT_MISMATCH


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    weight_map = dict.fromkeys(TENSORS, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert open_checkpoint(path).metas.keys() == TENSORS.keys()
    edit_index(path, "a", None)
    with pytest.raises(PreconditionFailed, match="holds a, against the index"):
        open_checkpoint(path)


def test_files_that_no_engine_takes_for_weights_may_lie_beside_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path)
    for name in (".model-1.safetensors", "model.safetensors.tmp", "pytorch_model.bin", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "original").mkdir()
    save_file(TENSORS, tmp_path / "original" / "model.safetensors")
    assert open_checkpoint(path).metas.keys() == TENSORS.keys()


@pytest.mark.parametrize("files", [0, 2])
def test_a_file_that_comes_to_an_opened_checkpoint_is_noticed(tmp_path: Path, files: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path, files=files))
    checkpoint.check_unchanged()
    save_file({"a": torch.zeros(3, 4)}, tmp_path / "more.safetensors")
    with pytest.raises(NotFound, match="changed while the checkpoint was open"):
        checkpoint.check_unchanged()
    (tmp_path / "more.safetensors").unlink()
    checkpoint.check_unchanged()
    weight_map = dict.fromkeys(TENSORS, "more.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(NotFound, match="changed while the checkpoint was open"):
        checkpoint.check_unchanged()


@pytest.mark.parametrize(("name", "file"), [("\ud800", "model-00001-of-00002.safetensors"), ("a", "\ud800")])
def test_what_is_said_of_an_index_that_holds_no_text_can_be_told(tmp_path: Path, name: str, file: str) -> None:
    path = write(tmp_path, files=2)
    edit_index(path, name, file)
    with pytest.raises(RlctlError, match=r"\\ud800") as caught:
        open_checkpoint(path)
    assert common_pb2.ErrorDetail.FromString(caught.value.detail().SerializeToString()).message == caught.value.message


def test_a_comparison_lists_what_is_missing_extra_and_of_another_shape() -> None:
    reference = {f"n{index}": TensorMeta(f"n{index}", torch.float32, (2, 3)) for index in range(9)}
    found = {
        **{name: meta for name, meta in reference.items() if name in ("n0", "n1")},
        "n1": TensorMeta("n1", torch.float32, (3, 2)),
        "x": TensorMeta("x", torch.float32, ()),
    }
    with pytest.raises(PreconditionFailed) as caught:
        compare(found, reference, what="the checkpoint /models/a")
    message = caught.value.message
    assert message.startswith("the checkpoint /models/a does not fit: 7 missing (n2, n3, n4, n5, n6 and 2 more)")
    assert "1 extra (x)" in message
    assert "1 of another shape (n1 (3, 2) instead of (2, 3))" in message
    assert caught.value.metadata["missing"].split("\n") == [f"n{index}" for index in range(2, 9)]
    assert caught.value.metadata["extra"] == "x"


def test_a_comparison_lets_other_dtypes_pass() -> None:
    compare({"a": TensorMeta("a", torch.float32, (2,))}, {"a": TensorMeta("a", torch.bfloat16, (2,))}, what="it")


@pytest.mark.parametrize("files", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_loads_its_slices(tmp_path: Path, size: int, files: int) -> None:
    full = full_model()
    path = write(tmp_path, full, files=files)
    for rank in range(size):
        loaded, placed = tp_map(full, rank, size), tp_map(full, rank, size)
        for name, tensor in full.items():
            placed.place(name, tensor)
        assert loaded.load(open_checkpoint(path)) == set(full)
        for name, shard in loaded.shards.items():
            assert torch.equal(shard.local.float(), placed.shards[name].local.float()), name
            assert shard.local.float().abs().sum() > 0


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = full_model()
    shards = tp_map(full, 0, 2)
    wrong = {**full, "layer.norm.weight": torch.zeros(3), "more": torch.zeros(1)}
    del wrong["embed.weight"]
    with pytest.raises(
        PreconditionFailed, match=r"1 missing .embed.weight.; 1 extra .more.; 1 of another shape"
    ) as caught:
        shards.load(open_checkpoint(write(tmp_path, wrong)))
    assert caught.value.outcome == common_pb2.OUTCOME_REJECTED
    assert not any(shard.local.float().abs().sum() for shard in shards.shards.values())


def test_floats_are_cast_but_codes_are_not_made_of_them(tmp_path: Path) -> None:
    full = {"codes": torch.zeros(2, 2, dtype=torch.float8_e4m3fn), "norm": torch.zeros(2, dtype=torch.bfloat16)}
    shards = ShardMap({name: Shard(TensorMeta.of(name, t), t.clone()) for name, t in full.items()})
    given = {"codes": torch.ones(2, 2, dtype=torch.bfloat16), "norm": torch.ones(2)}
    with pytest.raises(PreconditionFailed, match=r"1 of another dtype .codes torch.bfloat16 instead of") as caught:
        shards.load(open_checkpoint(write(tmp_path / "given", given)))
    assert list(caught.value.metadata) == ["dtypes"]
    good = {**given, "codes": given["codes"].to(torch.float8_e4m3fn)}
    shards.load(open_checkpoint(write(tmp_path / "good", good)))
    assert shards.shards["norm"].local.eq(1).all()


def test_ignored_tensors_may_be_extra(tmp_path: Path) -> None:
    full = full_model()
    checkpoint = open_checkpoint(write(tmp_path, {**full, "rotary.inv_freq": torch.zeros(1)}))
    assert tp_map(full, 0, 1).load(checkpoint, ignore={"rotary.inv_freq"}) == set(full)


def test_a_checkpoint_that_has_changed_since_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    full = full_model()
    shards = tp_map(full, 0, 1)
    checkpoint = open_checkpoint(write(tmp_path, full, files=len(full)))
    Path(checkpoint.path, f"model-{len(full):05}-of-{len(full):05}.safetensors").unlink()
    with pytest.raises(NotFound) as caught:
        shards.load(checkpoint)
    assert caught.value.outcome == common_pb2.OUTCOME_REJECTED
    assert not any(shard.local.float().abs().sum() for shard in shards.shards.values())


def test_a_file_that_is_cut_short_while_it_is_read_ends_typed_and_leaves_the_weights_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}
    shards = ShardMap({name: Shard(TensorMeta.of(name, t), torch.zeros_like(t)) for name, t in full.items()})
    checkpoint = open_checkpoint(write(tmp_path, full))
    read = TensorFile.read_bytes

    def cut_then_read(file: TensorFile, offset: int, into: torch.Tensor) -> None:
        os.truncate(file.path, 1000)
        read(file, offset, into)

    monkeypatch.setattr(TensorFile, "read_bytes", cut_then_read)
    with pytest.raises(NotFound, match="cut short while it was read") as caught:
        shards.load(checkpoint)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY


def test_a_file_that_is_written_to_while_it_is_read_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = full_model()
    checkpoint = open_checkpoint(write(tmp_path, full))
    read = TensorFile.read_bytes

    def touch_then_read(file: TensorFile, offset: int, into: torch.Tensor) -> None:
        os.utime(file.path, ns=(1, 1))
        read(file, offset, into)

    monkeypatch.setattr(TensorFile, "read_bytes", touch_then_read)
    with pytest.raises(NotFound, match="was changed while") as caught:
        tp_map(full, 0, 1).load(checkpoint)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY


def test_an_opened_checkpoint_can_be_read_when_another_has_taken_its_place(tmp_path: Path) -> None:
    full = full_model()
    shards = tp_map(full, 0, 1)
    checkpoint = open_checkpoint(write(tmp_path / "a", full))
    (tmp_path / "a").rename(tmp_path / "gone")
    write(tmp_path / "a", full_model(seed=1))
    shutil.rmtree(tmp_path / "gone")
    checkpoint.read_into([(name, Slice(), shard.local) for name, shard in shards.shards.items()])
    assert torch.equal(shards.shards["embed.weight"].local, full["embed.weight"])
    with pytest.raises(NotFound, match="changed or removed"):
        shards.load(checkpoint)


def test_only_some_tensors_are_loaded_and_the_others_may_be_missing(tmp_path: Path) -> None:
    full = full_model()
    part = {name: full[name] for name in ("layer.q.weight", "layer.norm.weight", "layer.scale")}
    shards = tp_map(full, 1, 2)
    checkpoint = open_checkpoint(write(tmp_path, part))
    only = {"layer.q.weight", "layer.norm.weight"}
    assert shards.load(checkpoint, only=only) == only
    written = {name for name, shard in shards.shards.items() if shard.local.float().abs().sum()}
    assert written == only
    with pytest.raises(PreconditionFailed, match=r"1 missing .embed.weight."):
        shards.load(checkpoint, only={"embed.weight"})


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_process_without_a_free_file_descriptor_does_not_call_a_checkpoint_missing(
    tmp_path: Path, count: int
) -> None:
    path = write(tmp_path / "model", files=3)
    before = len(os.listdir("/proc/self/fd"))
    with files_left(count), pytest.raises(RlctlError) as caught:
        open_checkpoint(path)
    assert (caught.value.reason, caught.value.field) == (Reason.TOO_MANY_FILES, "model_path")
    del caught
    assert len(os.listdir("/proc/self/fd")) == before
