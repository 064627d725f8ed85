"""What a message says about a segment is checked before anything is mapped."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import Shape, TensorHandle, TensorSegment
from rlctl.weights.shared_memory.segment import at, from_proto

NAME = f"rlctl-{'a' * 32}"


def handle(name: str, offset: int, *dims: int, dtype: str = "torch.float32") -> TensorHandle:
    return TensorHandle(name=name, dtype=dtype, shape=Shape(dims=dims), offset=offset)


def message(*tensors: TensorHandle, node: str = "here", device: str = "cpu", **fields: object) -> TensorSegment:
    settings = {"shared_memory": NAME, "size": 8192, "generation": 1, "lease": duration(10)}
    listed = tensors or (handle("a", 4096, 3), handle("b", 4108, 2, 2), handle("none", 4108, 0), handle("c", 4124))
    return TensorSegment(node=node, device=device, tensors=listed, **{**settings, **fields})  # type: ignore[arg-type]


def refusal(call: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        call()
    return caught.value


def test_a_segment_is_what_its_message_says() -> None:
    segment = from_proto(message(), "segments[0]")
    assert [(meta.name, meta.shape, offset) for meta, offset in segment.tensors] == [
        ("a", (3,), 4096),
        ("b", (2, 2), 4108),
        ("none", (0,), 4108),
        ("c", (), 4124),
    ]
    assert (segment.header, segment.cuda_handle, segment.size) == (NAME, b"", 8192)
    assert segment.until == pytest.approx(time.monotonic() + 10, abs=1)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (message(shared_memory=f"../{NAME}"), "s.shared_memory"),
        (message(shared_memory=""), "s.handle"),
        (message(cuda_ipc=bytes(64)), "s.header_memory"),
        (message(cuda_ipc=bytes(63), header_memory=NAME), "s.cuda_ipc"),
        (message(size=0), "s.size"),
        (message(size=1 << 63), "s.size"),
        (message(handle("", 4096)), "s.tensors[0].name"),
        (message(handle("a", 4096, dtype="object")), "s.tensors[0].dtype"),
        (message(handle("a", 4096, dtype="torch.qint8")), "s.tensors[0].dtype"),
        (message(handle("a", 4092)), "s.tensors[0].offset"),
        (message(handle("a", 0)), "s.tensors[0].offset"),
        (message(handle("a", 4098)), "s.tensors[0].offset"),
        (message(handle("a", 8192)), "s.tensors[0].offset"),
        (message(handle("a", 4096, 1025)), "s.tensors[0].offset"),
        (message(handle("a", (1 << 64) - 4)), "s.tensors[0].offset"),
        (message(handle("a", 4096, 1 << 40, 1 << 40)), "s.tensors[0].shape"),
        (message(handle("a", 4096, 0, 1 << 63)), "s.tensors[0].shape"),
        (message(handle("a", 4096), handle("b", 4100), handle("a", 4104)), "s.tensors"),
        (message(handle("a", 4096, 4), handle("b", 4108, 4)), "s.tensors"),
        (message(handle("a", 4100, 4), handle("b", 4096, 2)), "s.tensors"),
        (message(handle("a", 4096, 4), handle("b", 4096, 4)), "s.tensors"),
        (message(handle("a", 4096, 8), handle("b", 4100, 1), handle("c", 4120, 1)), "s.tensors"),
    ],
)
def test_what_cannot_be_is_refused(bad: TensorSegment, field: str) -> None:
    assert refusal(lambda: from_proto(bad, "s")).field == field


def test_the_segments_for_a_place_are_found_by_host_and_device() -> None:
    segments = [
        from_proto(message(handle("a", 4096)), "0"),
        from_proto(message(handle("b", 4096)), "1"),
        from_proto(message(handle("a", 4096), handle("b", 4100), device="GPU-1"), "2"),
        from_proto(message(handle("a", 4096), handle("b", 4100), node="there"), "3"),
    ]
    assert [s.field for s in at(segments, "here", "cpu")] == ["0", "1"]
    assert [s.field for s in at(segments, "here", "GPU-1")] == ["2"]
    assert [s.field for s in at(segments, "there", "cpu")] == ["3"]
    for node, device in (("here", "GPU-2"), ("elsewhere", "cpu"), ("", "cpu")):
        error = refusal(lambda node=node, device=device: at(segments, node, device))
        assert (error.reason, error.field) == (Reason.NOT_COLOCATED, "segments")
    # What one place gets and another does not would be a mixture.
    error = refusal(lambda: at(segments[1:], "here", "cpu"))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "segments")
    assert error.message.endswith(": a")
    error = refusal(lambda: at([*segments, segments[0]], "here", "cpu"))
    assert error.field == "segments.tensors"
