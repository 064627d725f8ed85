"""Memory that is shared with SGLang, by the names of torch's shared memory manager."""

from __future__ import annotations

import pytest
import torch
from rlctl_sglang.updates import from_tensor
from rlctl_sglang.updates.from_tensor import Handed

from rlctl.contract.errors import Reason, RlctlError

TENSORS = [("a", torch.arange(5.0)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))]
LATE = "Shared memory manager connection has timed out\nException raised from recv (most recent call first):\nframe #0"


def failing(patch: pytest.MonkeyPatch, *messages: str) -> list[int]:
    """Torch fails with these, one after the other, and then works again; sizes that it was asked for."""
    real, left, asked = torch.UntypedStorage._new_using_filename_cpu, list(messages), list[int]()

    def make(size: int) -> torch.UntypedStorage:
        asked.append(size)
        if left:
            raise RuntimeError(left.pop(0))
        return real(size)

    patch.setattr(torch.UntypedStorage, "_new_using_filename_cpu", make)
    return asked


def test_a_manager_that_is_slow_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(monkeypatch, LATE, LATE)
    handed = Handed(TENSORS, lambda: None)
    assert len(asked) == 3
    assert handed.payload()


def test_one_that_stays_silent_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, *[LATE] * 100)
    with pytest.raises(RlctlError) as failed:
        Handed(TENSORS, lambda: None)
    assert failed.value.reason is Reason.ENGINE_FAILED
    assert failed.value.message.endswith("Shared memory manager connection has timed out")


def test_a_lack_of_memory_is_told_at_once_and_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(monkeypatch, "unable to mmap 128 bytes: Cannot allocate memory (12)\nframe #0")
    with pytest.raises(RlctlError) as failed:
        Handed(TENSORS, lambda: None)
    assert (failed.value.reason, len(asked)) == (Reason.SHARED_MEMORY_FULL, 1)
    assert failed.value.message.endswith("Cannot allocate memory (12)")


FULL = "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)\nframe #0"


def test_room_that_other_engines_copies_take_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = failing(monkeypatch, FULL, FULL)
    assert Handed(TENSORS, lambda: None).payload()
    assert len(asked) == 3


def test_room_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_tensor, "FULL_S", 0.0)
    failing(monkeypatch, *[FULL] * 100)
    with pytest.raises(RlctlError, match="No space left") as failed:
        Handed(TENSORS, lambda: None)
    assert failed.value.reason is Reason.SHARED_MEMORY_FULL
