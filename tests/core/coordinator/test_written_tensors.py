"""What an implicit update counts as written when every stage gets its own writes."""

from __future__ import annotations

from rlctl.contract.errors import Reason
from rlctl.coordinator.updates.written_tensors import WrittenTensors, reader_of
from rlctl.v1.verbs_pb2 import SegmentReader, TensorHandle, TensorSegment, UpdateWeightsFromTensorRequest

STAGES = {"a", "b"}


def write(slot: str, *names: str) -> UpdateWeightsFromTensorRequest:
    reader = SegmentReader(slot=slot) if slot else None
    segment = TensorSegment(reader=reader, tensors=[TensorHandle(name=name) for name in names])
    return UpdateWeightsFromTensorRequest(segments=[segment])


def test_a_tensor_is_written_when_the_last_stage_has_it() -> None:
    written = WrittenTensors({"w"})
    for slot, whole in (("a", False), ("a", False), ("b", True)):
        written.announce(write(slot, "w"))
        written.done(write(slot, "w"), STAGES)
        assert written.whole is whole
        assert (written.incomplete(partial=False) is None) is whole
        assert (written.uneven(STAGES) is None) is whole


def test_a_stage_without_a_tensor_that_another_one_has_is_named() -> None:
    written = WrittenTensors()
    written.done(write("a", "v", "w"), STAGES)
    written.done(write("b", "v"), STAGES)
    error = written.uneven(STAGES)
    assert error is not None
    assert error.reason is Reason.WEIGHTS_INCOMPLETE
    assert "w was written to a and not to b" in error.message
    assert written.uneven({"a"}) is None  # b was lost in the meantime


def test_writes_for_all_stages_have_no_reader() -> None:
    written = WrittenTensors({"w"})
    request = write("", "w")
    assert reader_of(request) == ""
    written.done(request, STAGES)
    assert written.whole
    assert written.uneven(STAGES) is None
