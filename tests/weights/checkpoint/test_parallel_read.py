"""Parts of tensors are read from files as they stand there, whatever their cut, dtype and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from rlctl.contract.errors import InvalidRequest, NotFound
from rlctl.weights.checkpoint import parallel_read
from rlctl.weights.checkpoint.parallel_read import Part, read_parts
from rlctl.weights.checkpoint.safetensors_file import DTYPES, TensorFile, header_of
from rlctl.weights.tensor.slices import Slice
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], Slice]:
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    if not shape or draw(st.booleans()):
        return shape, Slice()
    dim = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[dim]))
    return shape, Slice(dim, start, draw(st.integers(0, shape[dim] - start)))


@given(
    cut=cuts(),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    cast=st.booleans(),
    memory=st.sampled_from(["contiguous", "transposed", "every other"]),
    limits=st.sampled_from([(16 << 20, 1 << 20, 128 << 10), (8, 8, 1), (8, 8, 1 << 20), (64, 24, 16)]),
    threads=st.sampled_from([1, 3]),
)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_part_is_what_narrowing_the_whole_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cut: tuple[list[int], Slice],
    stored: torch.dtype,
    cast: bool,
    memory: str,
    limits: tuple[int, int, int],
    threads: int,
) -> None:
    shape, part = cut
    for name, value in zip(("CHUNK_BYTES", "BUFFER_BYTES", "RUN_BYTES"), limits, strict=True):
        monkeypatch.setattr(parallel_read, name, value)
    full = torch.randint(0, 100, shape).to(stored)
    save_file({"before": torch.ones(3, dtype=torch.uint8), "t": full}, tmp_path / "f.safetensors")
    wanted = part.shape(tuple(shape))
    dtype = torch.float64 if cast else stored
    if memory == "contiguous" or not wanted:
        into = torch.zeros(wanted, dtype=dtype)
    elif memory == "transposed":
        into = torch.zeros(wanted[::-1], dtype=dtype).permute(*reversed(range(len(wanted))))
    else:
        into = torch.zeros((*wanted[:-1], 2 * wanted[-1]), dtype=dtype)[..., ::2]
    file = TensorFile(tmp_path / "f.safetensors")
    read_parts([Part(file, file.offsets["t"], file.metas["t"], part, into)], threads=threads)
    expected = full if part.dim is None else full.narrow(part.dim, part.start, part.length)
    assert torch.equal(into, expected.to(dtype))


def test_a_part_that_lies_together_is_read_without_what_is_around_it(tmp_path: Path) -> None:
    save_file({"t": torch.randn(64, 1000)}, tmp_path / "f.safetensors")
    file = TensorFile(tmp_path / "f.safetensors")
    into = torch.empty(8, 1000)
    assert read_parts([Part(file, file.offsets["t"], file.metas["t"], Slice(0, 40, 8), into)]) == into.nbytes


def test_a_header_is_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {
        name: torch.zeros(2, 3, dtype=getattr(torch, dtype)) for name, dtype in DTYPES.items() if dtype != "complex64"
    }
    metas = [TensorMeta.of(name, tensor) for name, tensor in tensors.items()]
    file = tmp_path / "f.safetensors"
    file.write_bytes(header_of(metas, {"k": "v"}) + b"".join(bytes(as_bytes(t).numpy().data) for t in tensors.values()))
    read = load_file(file)
    assert {name: (t.dtype, t.shape) for name, t in read.items()} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    opened = TensorFile(file)
    assert opened.metas == {meta.name: meta for meta in metas}
    assert opened.metadata == {"k": "v"}
    with pytest.raises(InvalidRequest, match="hold no"):
        header_of([TensorMeta("x", torch.complex128, (1,))])


def edited(change) -> bytes:
    """A file whose header was changed."""
    data = save({"a": torch.ones(4), "b": torch.ones(2)})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    body = json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body + data[8 + length :]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too short"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "header would be"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((2).to_bytes(8, "little") + b"\xff{", "cannot be read"),
        (edited(lambda h: h["a"].update(data_offsets=[0, 8])), "8 bytes instead of 16"),
        (edited(lambda h: h["a"].update(data_offsets=[8, 24])), "comes next"),
        (edited(lambda h: h["a"].update(data_offsets=[-16, 0])), "proper shape"),
        (edited(lambda h: h["a"].update(shape=[4.0])), "proper shape"),
        (edited(lambda h: h["a"].update(dtype="F4")), "dtype F4"),
        (edited(lambda h: h["a"].pop("shape")), "no dtype, shape"),
        (edited(lambda h: h.update(a=3)), "no dtype, shape"),
        (edited(lambda h: h.pop("b")), "header promises"),
        (edited(lambda h: h.update(__metadata__={"k": 1})), "map of texts"),
    ],
)
def test_a_damaged_header_is_refused_with_its_cause(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(NotFound, match=words) as caught:
        TensorFile(tmp_path / "f.safetensors", field="x")
    assert caught.value.field == "x"


@given(data=st.binary(max_size=200).filter(lambda data: data.strip() != b"{}"))  # a file without tensors
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_is_refused_typed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(NotFound):
        TensorFile(tmp_path / "f.safetensors")
