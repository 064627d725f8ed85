"""Planning, packing and describing buckets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.contract.errors import InvalidRequest, Reason
from rlctl.v1 import verbs_pb2
from rlctl.weights.tensor.buckets import Bucket, from_proto, pack, plan, to_proto, unpack
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

DTYPES = [torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
metas_lists = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12).map(
    lambda kinds: [TensorMeta(f"t{index}", dtype, shape) for index, (dtype, shape) in enumerate(kinds)]
)


def random_tensor(meta: TensorMeta) -> torch.Tensor:
    data = torch.randint(0, 2, (meta.nbytes,), dtype=torch.uint8)
    return data.view(meta.dtype).reshape(meta.shape)


@given(metas=metas_lists, bucket_bytes=st.integers(1, 300), large_bytes=st.integers(1, 300))
def test_a_plan_holds_every_tensor_once_in_order(metas: list[TensorMeta], bucket_bytes: int, large_bytes: int) -> None:
    buckets = plan(metas, bucket_bytes=bucket_bytes, large_bytes=large_bytes)
    assert [bucket.sequence for bucket in buckets] == list(range(len(buckets)))
    assert sorted(meta.name for bucket in buckets for meta in bucket.metas) == sorted(meta.name for meta in metas)
    position = {meta.name: index for index, meta in enumerate(metas)}
    lasts = []
    for bucket in buckets:
        places = [position[meta.name] for meta in bucket.metas]
        assert places == sorted(places)
        lasts.append(places[-1])
        if bucket.flattened:
            assert all(meta.nbytes < large_bytes for meta in bucket.metas)
            assert bucket.nbytes <= bucket_bytes or len(bucket.metas) == 1
            assert bucket.nbytes == sum(meta.nbytes for meta in bucket.metas), "no gap, which SGLang knows nothing of"
        else:
            assert [meta.nbytes >= large_bytes for meta in bucket.metas] == [True]
    assert lasts == sorted(lasts)
    # No packed bucket but the last could have taken the tensor that was packed after it, without a gap.
    packed = [bucket for bucket in buckets if bucket.flattened]
    for bucket, following in itertools.pairwise(packed):
        longer = Bucket(0, [*bucket.metas, following.metas[0]], flattened=True)
        assert longer.nbytes > bucket_bytes or longer.nbytes > sum(meta.nbytes for meta in longer.metas)


@given(metas=metas_lists, bucket_bytes=st.integers(1, 300))
def test_packing_and_unpacking_returns_every_byte(metas: list[TensorMeta], bucket_bytes: int) -> None:
    tensors = {meta.name: random_tensor(meta) for meta in metas}
    # A buffer that was used before, as senders have it.
    buffer = torch.full((4096,), 0xAA, dtype=torch.uint8)
    for bucket in plan(metas, bucket_bytes=bucket_bytes, large_bytes=1 << 30):
        packed = pack(bucket, tensors, buffer)
        assert packed.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert packed.numel() == bucket.nbytes
        for name, view in unpack(bucket, packed):
            assert (view.dtype, view.shape) == (tensors[name].dtype, tensors[name].shape)
            assert torch.equal(as_bytes(view), as_bytes(tensors[name]))
        used = {i for m, o in zip(bucket.metas, bucket.offsets, strict=True) for i in range(o, o + m.nbytes)}
        assert not any(packed[i] for i in range(bucket.nbytes) if i not in used)


@given(metas=metas_lists)
def test_where_plain_concatenation_can_be_read_it_is_the_layout(metas: list[TensorMeta]) -> None:
    ends = [sum(meta.nbytes for meta in metas[:index]) for index in range(len(metas))]
    bucket = Bucket(0, metas, flattened=True)
    if all(end % meta.dtype.itemsize == 0 for end, meta in zip(ends, metas, strict=True)):
        assert bucket.offsets == ends
    assert all(offset % meta.dtype.itemsize == 0 for offset, meta in zip(bucket.offsets, metas, strict=True))


@given(metas=metas_lists.filter(bool), flattened=st.booleans(), sequence=st.integers(0, 1 << 40))
@settings(max_examples=50)
def test_a_bucket_goes_through_its_message(metas: list[TensorMeta], flattened: bool, sequence: int) -> None:
    bucket = Bucket(sequence, metas, flattened)
    message = verbs_pb2.TensorBucket.FromString(to_proto(bucket).SerializeToString())
    assert from_proto(message) == bucket


def test_packing_goes_on_past_a_large_tensor() -> None:
    small = [TensorMeta(f"s{index}", torch.float32, (2,)) for index in range(3)]
    large = TensorMeta("large", torch.float32, (100,))
    buckets = plan([small[0], large, small[1], small[2]], bucket_bytes=1000, large_bytes=400)
    assert [(bucket.flattened, [meta.name for meta in bucket.metas]) for bucket in buckets] == [
        (False, ["large"]),
        (True, ["s0", "s1", "s2"]),
    ]


def test_tensors_given_together_are_never_split() -> None:
    def meta(name: str, size: int) -> TensorMeta:
        return TensorMeta(name, torch.int8, (size,))

    together = [meta("b", 40), meta("c", 40)]
    with_large = [meta("e", 10), meta("f", 200)]
    oversized = [meta("g", 60), meta("h", 60)]
    buckets = plan([meta("a", 40), together, meta("d", 10), with_large, oversized], bucket_bytes=100, large_bytes=200)
    assert [(bucket.flattened, [meta.name for meta in bucket.metas]) for bucket in buckets] == [
        (True, ["a"]),
        (True, ["b", "c", "d"]),
        (False, ["e", "f"]),
        (True, ["g", "h"]),
    ]


def test_nothing_makes_no_buckets() -> None:
    assert plan([]) == []
    assert Bucket(0, [], flattened=True).nbytes == 0
    assert unpack(Bucket(0, [], flattened=True), pack(Bucket(0, [], flattened=True), {})) == []


def test_a_plan_refuses_bad_sizes_and_names_that_come_twice() -> None:
    meta = TensorMeta("w", torch.int8, (1,))
    for sizes in ({"bucket_bytes": 0}, {"large_bytes": -1}):
        with pytest.raises(InvalidRequest, match="no buckets of"):
            plan([meta], **sizes)
    with pytest.raises(InvalidRequest, match="'w' appears twice"):
        plan([meta, [meta]])


def test_packing_refuses_what_the_bucket_does_not_say() -> None:
    bucket = Bucket(3, [TensorMeta("w", torch.float32, (2,))], flattened=True)
    with pytest.raises(InvalidRequest, match="tensors of bucket 3 are missing: w") as caught:
        pack(bucket, {})
    assert caught.value.reason is Reason.FIELD_REQUIRED
    for wrong in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(InvalidRequest, match="the bucket has"):
            pack(bucket, {"w": wrong})


@pytest.mark.parametrize(
    "buffer", [torch.zeros(7, dtype=torch.uint8), torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8)], ids=repr
)
def test_unpacking_refuses_a_buffer_that_does_not_fit(buffer: torch.Tensor) -> None:
    with pytest.raises(InvalidRequest, match="bucket 0 needs 8 bytes"):
        unpack(Bucket(0, [TensorMeta("w", torch.float32, (2,))], flattened=True), buffer)


def message(**changes: object) -> verbs_pb2.TensorBucket:
    fields: dict[str, object] = {
        "names": ["a", "b"],
        "dtypes": ["torch.float32", "bfloat16"],
        "shapes": [verbs_pb2.Shape(dims=[2, 3]), verbs_pb2.Shape()],
    }
    return verbs_pb2.TensorBucket(**(fields | changes))  # type: ignore[arg-type]


def test_a_format_that_is_not_said_means_tensor_by_tensor() -> None:
    bucket = from_proto(message())
    assert not bucket.flattened
    assert bucket.metas == [TensorMeta("a", torch.float32, (2, 3)), TensorMeta("b", torch.bfloat16, ())]


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"names": []}, Reason.FIELD_REQUIRED, "buckets[7].names"),
        ({"names": ["a"]}, Reason.LENGTH_MISMATCH, "buckets[7]"),
        ({"dtypes": ["torch.float32"]}, Reason.LENGTH_MISMATCH, "buckets[7]"),
        ({"shapes": []}, Reason.LENGTH_MISMATCH, "buckets[7]"),
        ({"dtypes": ["torch.float32", "float33"]}, Reason.FIELD_INVALID, "buckets[7].dtypes[1]"),
        ({"names": ["a", "a"]}, Reason.FIELD_INVALID, "buckets[7].names"),
        ({"names": ["", "a"]}, Reason.FIELD_INVALID, "buckets[7].names[0]"),
        (
            {"shapes": [verbs_pb2.Shape(), verbs_pb2.Shape(dims=[1 << 63])]},
            Reason.FIELD_INVALID,
            "buckets[7].shapes[1]",
        ),
        (
            {"shapes": [verbs_pb2.Shape(dims=[1 << 40, 1 << 40]), verbs_pb2.Shape()]},
            Reason.FIELD_INVALID,
            "buckets[7].shapes[0]",
        ),
        (
            {"shapes": [verbs_pb2.Shape(dims=[0, 1 << 63]), verbs_pb2.Shape()]},
            Reason.FIELD_INVALID,
            "buckets[7].shapes[0]",
        ),
        ({"format": 99}, Reason.UNKNOWN_ENUM_VALUE, "buckets[7].format"),
    ],
    ids=str,
)
def test_a_message_that_makes_no_bucket_is_refused(changes: dict[str, object], reason: Reason, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_proto(message(**changes), "buckets[7]")
    assert (caught.value.reason, caught.value.field) == (reason, field)


def test_a_length_mismatch_names_the_three_lengths() -> None:
    with pytest.raises(InvalidRequest, match="3 names, 2 dtypes and 2 shapes"):
        from_proto(message(names=["a", "b", "c"]))


def test_sizes_are_counted_in_bytes() -> None:
    meta = TensorMeta("w", torch.float64, (3, 5))
    assert meta.nbytes == math.prod(meta.shape) * 8
    bucket = Bucket(0, [TensorMeta("c", torch.int8, (3,)), meta], flattened=True)
    assert (bucket.offsets, bucket.nbytes) == ([0, 8], 128)
    assert Bucket(0, bucket.metas, flattened=False).nbytes == 123
