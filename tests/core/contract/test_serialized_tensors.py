"""Pickles of tensor handles are read as data. What SGLang 0.5.23 and torch 2.13 wrote is stored beside this file."""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pickle_assembler import (
    REDUCTIONS,
    TENSOR,
    UUID,
    Call,
    Global,
    New,
    assemble,
    cuda_tensor,
    encoded,
    metadata,
    shared_tensor,
    size,
)
from pickle_mutations import ATTACKS, Witness, mutated

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.handles import CudaStorage, SharedStorage
from rlctl.contract.serialized_tensors.payload import Placed, read_payloads
from rlctl.contract.serialized_tensors.pickle_reader import MOST_BYTES, MOST_OPCODES

STORED: dict[str, str] = json.loads((Path(__file__).parent / "serialized_payloads.json").read_text())
FIELD = "serialized_named_tensors"
BUCKET = "flattened_bucket"


def read(*payloads: str, load_format: str | None = None) -> list[list[Placed]]:
    return read_payloads(payloads, load_format, FIELD)


def refused(value: Any, load_format: str | None = None) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        read(value if isinstance(value, str) else encoded(value), load_format=load_format)
    assert caught.value.field == f"{FIELD}[0]"
    assert caught.value.next_step
    return caught.value


def described(placed: list[Placed]) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(t.name, t.dtype, t.shape, t.offset) for each in placed for t in each.tensors]


# What SGLang writes.


def test_a_flattened_bucket_of_sglangs_in_shared_memory() -> None:
    [[placed]] = read(STORED["flat"], load_format=BUCKET)
    storage = placed.storage
    assert isinstance(storage, SharedStorage)
    assert storage.size == 36
    assert re.fullmatch(r"torch_\d+_\d+_0", storage.name)
    assert described([placed]) == [
        ("a.weight", "torch.float32", (2, 3), 0),
        ("b", "torch.bfloat16", (4,), 24),
        ("s", "torch.float32", (), 32),
    ]


def test_names_and_tensors_of_sglangs_in_shared_memory() -> None:
    """A parameter, a tensor, and a view of it: the pickle has their storage once, or once more for each reference."""
    [placed] = read(STORED["pairs"])
    by_name = {name: (kind, shape, offset) for name, kind, shape, offset in described(placed)}
    assert by_name == {
        "a": ("torch.float32", (2, 3), 0),
        "c": ("torch.bfloat16", (4,), 0),
        "d": ("torch.bfloat16", (2,), 4),
    }


def test_every_rank_has_its_own_payload_of_a_local_serialized_tensor() -> None:
    first, second = read(STORED["local"], STORED["local"])
    assert described(first) == described(second) == [("a", "torch.float32", (2, 3), 0)]
    assert isinstance(first[0].storage, SharedStorage)
    assert isinstance(second[0].storage, SharedStorage)
    assert first[0].storage.name != second[0].storage.name
    with pytest.raises(RlctlError, match="no payload for rank 2"):
        read(*[STORED["local"]] * 3)


def test_an_empty_bucket_has_no_tensors() -> None:
    assert read(STORED["empty"], load_format=BUCKET) == [[]]
    assert read(STORED["descriptor_empty"], load_format=BUCKET) == [[]]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("modified", [True, False])
def test_a_flattened_bucket_on_a_gpu(protocol: int, modified: bool) -> None:
    bucket = {
        "flattened_tensor": cuda_tensor(32, modified=modified, offset=64),
        "metadata": [metadata("w", "bfloat16", (2, 4), 0, 16), metadata("b", "float32", (4,), 16, 32)],
    }
    [[placed]] = read(encoded(bucket, protocol), load_format=BUCKET)
    storage = placed.storage
    assert isinstance(storage, CudaStorage)
    assert (storage.device, storage.handle, storage.offset, storage.size) == (UUID, b"\x01c" + b"h" * 64, 512, 4096)
    assert (storage.ref_counter, storage.ref_counter_offset) == ("torch_77_88_9", 3)
    assert (storage.event, storage.event_sync_required) == (b"e" * 64, True)
    assert described([placed]) == [("w", "torch.bfloat16", (2, 4), 64), ("b", "torch.float32", (4,), 80)]


def test_tensors_on_a_gpu_without_elements_have_no_handle() -> None:
    bucket = {"flattened_tensor": cuda_tensor(0, handle=None, storage_size=0), "metadata": []}
    assert read(encoded(bucket), load_format=BUCKET) == [[]]


# Handles that are not readable.


@pytest.mark.parametrize(
    ("value", "load_format", "words"),
    [
        (STORED["descriptor_flat"], BUCKET, "set_sharing_strategy"),
        (STORED["meta"], None, "rebuild_meta_tensor"),
        (Global("torch_npu.multiprocessing.reductions", "rebuild_npu_tensor"), None, "rebuild_npu_tensor"),
        (Call(Global(REDUCTIONS, "rebuild_sparse_coo_tensor"), ()), None, "sparse"),
    ],
)
def test_known_handles_that_are_not_readable(value: Any, load_format: str | None, words: str) -> None:
    error = refused(value, load_format)
    assert error.reason is Reason.UNSUPPORTED
    assert words in f"{error.message} {error.next_step}"


def test_loaders_of_engines_are_refused() -> None:
    with pytest.raises(RlctlError, match="direct") as caught:
        read(STORED["pairs"], load_format="direct")
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "load_format")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (cuda_tensor(4, device=0), "monkey_patch_torch_reductions"),
        (cuda_tensor(4, ref_counter_offset=10_000), "ref_counter_offset"),
        (cuda_tensor(4, ref_counter=b"/../etc/passwd"), "reference counter"),
        (cuda_tensor(4, handle=b"h" * 257), "handle"),
        (cuda_tensor(4, event=None), "event"),
        (cuda_tensor(4, storage_size=-1), "storage_size_bytes"),
        (cuda_tensor(4, storage_offset=(1 << 63) - 1), "end of the storage"),
        (cuda_tensor(4097), "beyond its storage"),
        (cuda_tensor(4096, offset=1), "beyond its storage"),
        (cuda_tensor(2, 4, strides=(1, 2)), "contiguous"),
        (cuda_tensor(2, 4, strides=(0, 1)), "contiguous"),
        (cuda_tensor(2, 4, strides=(1,)), "different lengths"),
        (cuda_tensor(*[1] * 65), "64 dimensions"),
        (cuda_tensor(1 << 40, 1 << 40), "too many elements"),
        (cuda_tensor(4, cls=Global("torch.storage", "TypedStorage")), "neither Tensor nor Parameter"),
        (cuda_tensor(4, requires_grad=1), "requires_grad"),
        (cuda_tensor(4, storage_size=True), "storage_size_bytes"),
        (shared_tensor(4, nbytes=15), "beyond its storage"),
        (shared_tensor(4, nbytes=16, name="/rlctl-" + "0" * 32), "not a name"),
        (shared_tensor(4, nbytes=16, name="/torch_1_2_3/../x"), "not a name"),
        (Call(Global(REDUCTIONS, "rebuild_tensor"), (TENSOR,)), "1 arguments"),
        (Call(Global(REDUCTIONS, "rebuild_tensor"), (TENSOR, TENSOR, (0, size(), (), False))), "no dtype"),
    ],
)
def test_handles_that_contradict_themselves(tensor: Any, words: str) -> None:
    error = refused([("w", tensor)])
    assert error.reason is Reason.FIELD_INVALID
    assert words in error.message


@pytest.mark.parametrize(
    ("start", "end", "kind", "words"),
    [
        (0, 12, "float32", "do not fit"),
        (4092, 4108, "float32", "do not fit"),
        (2, 18, "float32", "no multiple"),
        (16, 0, "float32", "do not fit"),
    ],
)
def test_tensors_that_do_not_fit_their_bucket(start: int, end: int, kind: str, words: str) -> None:
    bucket = {"flattened_tensor": cuda_tensor(4096), "metadata": [metadata("w", kind, (4,), start, end)]}
    assert words in refused(bucket, BUCKET).message


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"flattened_tensor": cuda_tensor(4)},
        {"flattened_tensor": cuda_tensor(4), "metadata": 3},
        {"flattened_tensor": cuda_tensor(4), "metadata": [3]},
        {"flattened_tensor": 3, "metadata": []},
        {"flattened_tensor": cuda_tensor(4, kind="float32"), "metadata": []},
    ],
)
def test_no_bucket(value: Any) -> None:
    assert refused(value, BUCKET).reason is Reason.FIELD_INVALID


@pytest.mark.parametrize("value", [None, 3, ["w"], [("w", 3)], [("", cuda_tensor(4))], [(3, cuda_tensor(4))], [("w",)]])
def test_no_names_and_tensors(value: Any) -> None:
    assert refused(value).reason is Reason.FIELD_INVALID


# What a pickle could do.


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
@pytest.mark.parametrize("protocol", [2, 4])
def test_names_outside_of_the_table_are_refused(attack: Any, protocol: int) -> None:
    for value in (attack, [("w", attack)], (cuda_tensor(4), [attack])):
        assert refused(encoded(value, protocol)).reason is Reason.FIELD_INVALID
    assert Witness.calls == 0


def raw(code: bytes) -> str:
    return base64.b64encode(b"\x80\x04" + code).decode()


BOMBS = {
    "no end": b"]",
    "nothing": b"",
    "two values": b"]].",
    "after the end": b"]..",
    "a mark is open": b"(].",
    "stack underflow": b"R.",
    "below the mark": b"](\x85.",
    "memo of nothing": b"\x94.",
    "memo not stored": b"h\x07.",
    "memo out of order": b"]q\x07.",
    "a list of itself": b"]\x94h\x00a.",
    "a dict of itself": b"}\x94X\x01\x00\x00\x00ah\x00s.",
    "deep": b"(" * 100_000 + b"t" * 100_000 + b".",
    "nested tuples": b")" + b"\x85" * 500_000 + b".",
    "doubling": b"]\x94" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(200)) + b".",
    "huge bytes": b"\x8e" + (1 << 62).to_bytes(8, "little") + b".",
    "long bytes": b"B\xff\xff\xff\x7f.",
    "huge text": b"\x8d" + (1 << 63).to_bytes(8, "little") + b".",
    "huge number": b"\x8b\xff\xff\xff\x7f.",
    "long number": b"\x8a\xff" + b"\x7f" * 255 + b".",
    "decimal number": b"L" + b"9" * 1_000_000 + b"L\n.",
    "persistent id": b"Px\n.",
    "extension": b"\x82\x01.",
    "instance": b"(ios\nsystem\n.",
    "old object": b"(c" + b"os\nsystem\no.",
    "keyword object": b")}\x92.",
    "next buffer": b"\x97.",
    "pop": b"]0.",
    "dup": b"]2.",
    "float": b"G" + b"\x7f" * 8 + b".",
    "frame": b"\x95" + b"\xff" * 8 + b"].",
    "another protocol": b"\x80\x02].",
    "bad text": b"X\x02\x00\x00\x00\xff\xff.",
    "unhashable key": b"}]Ns.",
    "build on a list": b"]}b.",
    "many opcodes": b"N0" * 100,
}


@pytest.mark.parametrize("code", BOMBS.values(), ids=BOMBS)
def test_bombs_end_at_once(code: bytes) -> None:
    started = time.process_time()
    assert refused(raw(code)).reason is Reason.FIELD_INVALID
    assert time.process_time() - started < 4.0


def test_opcodes_are_counted_over_all_payloads() -> None:
    local = Global("sglang.srt.model_executor.model_runner", "LocalSerializedTensor")
    inner = [assemble(cuda_tensor(4))] * 3
    many = encoded([("w", New(local, {"values": [*inner, *[None] * (MOST_OPCODES // 3)]}))])
    assert len(read(many, many)) == 2
    with pytest.raises(RlctlError, match="opcodes") as caught:
        read(many, many, many)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, f"{FIELD}[2]")


def test_a_payload_above_the_limit_is_not_decoded() -> None:
    assert "characters" in refused("A" * (MOST_BYTES * 4 // 3 + 8)).message


@pytest.mark.parametrize("text", ["", "=", "@@@@", "gASV", "ÄÖ"])
def test_no_base64_or_no_pickle(text: str) -> None:
    assert refused(text).reason is Reason.FIELD_INVALID


# Mutations.


def test_ten_thousand_mutated_payloads_execute_nothing_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read as data or refused by name, in bounded time; no module is imported, nothing is called."""
    random_ = random.Random(36)
    flat = {"flattened_tensor": cuda_tensor(32), "metadata": [metadata("w", "bfloat16", (2, 8), 0, 32)]}
    stored = {"flat": BUCKET, "pairs": None, "local": None, "descriptor_flat": BUCKET}
    seeds = [
        *[(base64.b64decode(STORED[name]), load_format) for name, load_format in stored.items()],
        (assemble(flat), BUCKET),
        (assemble([("w", shared_tensor(4, nbytes=16)), ("b", cuda_tensor(4))]), None),
    ]
    errors: list[RlctlError | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "Unpickler", None)
        patch.setattr("builtins.__import__", None)
        for _ in range(10_000):
            data, load_format = random_.choice(seeds)
            payload = base64.b64encode(mutated(random_, data)).decode()
            started = time.monotonic()
            errors.append(outcome(payload, load_format))
            assert time.monotonic() - started < 2.0
    assert Witness.calls == 0
    refusals = [error for error in errors if error is not None]
    assert {error.reason for error in refusals} == {Reason.FIELD_INVALID, Reason.UNSUPPORTED}
    assert {error.field for error in refusals} == {f"{FIELD}[0]"}
    assert len(refusals) > 7_000
    assert errors.count(None) > 100  # a changed name or number of a handle is data, which ranks check


def outcome(payload: str, load_format: str | None) -> RlctlError | None:
    try:
        read(payload, load_format=load_format)
    except RlctlError as error:
        return error
    return None
