"""Weights on a GPU are read after what the trainer's stream was given, and are free once the device has read them."""

from __future__ import annotations

import threading

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.tensor.cuda_ordering import Ordering, trainer_stream


def test_without_a_gpu_nothing_is_waited_for() -> None:
    ordering = Ordering(None)
    with ordering.after():
        ordering.settle()


def test_only_a_stream_is_a_stream() -> None:
    with pytest.raises(RlctlError) as caught:
        Ordering(0)  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "stream")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
def test_another_thread_reads_what_the_stream_was_about_to_write() -> None:
    weights = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    read = []
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        weights.fill_(1.0)
        assert trainer_stream(None) == stream
    ordering = Ordering(stream)

    def take() -> None:
        with ordering.after():
            copy = weights.clone()
            ordering.settle()
            read.append(copy)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    # Overwritten the moment that it is free: the copy had been made by the device.
    weights.fill_(2.0)
    assert bool((read[0] == 1.0).all())
