"""Ordering of an update's reads after a trainer's work on a GPU, by events, without a wait on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rlctl.contract.errors import Reason


class Ordering:
    """All work enqueued on a stream before this object was made. Weights are read after it. From any thread."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """Record the end of the stream's work; None: no wait. Raises FIELD_INVALID for anything but a CUDA stream."""
        self._event: torch.cuda.Event | None = None
        if stream is None:
            return
        if not isinstance(stream, torch.cuda.Stream):
            raise Reason.FIELD_INVALID.error(f"stream is {type(stream)}, not a torch.cuda.Stream", field="stream")
        self._device = stream.device
        self._event = stream.record_event()

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """Inside, order this thread's work on the stream's device after the recorded work."""
        if self._event is None:
            yield
            return
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._event)
            yield

    def settle(self) -> None:
        """Wait until the device has completed this thread's work from inside :meth:`after`."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).synchronize()


def trainer_stream(stream: torch.cuda.Stream | None) -> torch.cuda.Stream | None:
    """Return ``stream``, or the calling thread's current stream; None in a process without GPU work."""
    if stream is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return stream
    return torch.cuda.current_stream()
