"""Work beside the steps of a rank."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from google.protobuf.message import Message
from rlctl_torch.steps.background import Beside, Later
from rlctl_torch.steps.collectives import Council

from rlctl.contract.errors import Reason, RlctlError


class Copy:
    """Something as large as a shadow copy."""


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield None
    gc.enable()


@pytest.mark.parametrize("agrees", [False, True], ids=["alone", "together"])
def test_a_failure_leaves_no_copy_behind(no_collections: None, agrees: bool) -> None:
    """A gigabyte must not wait for the cyclic garbage collector."""
    copies: list[weakref.ref[Copy]] = []

    def work() -> None:
        copy = Copy()
        copies.append(weakref.ref(copy))

        def fail() -> None:
            raise Reason.MEMORY_FULL.error("no room")

        run: Callable[[Callable[[], None]], None] = Council(0, 1).agree if agrees else lambda act: act()
        run(fail)

    failures: list[RlctlError | None] = []
    settled = threading.Event()

    def settle(_: Message | None, failure: RlctlError | None) -> None:
        failures.append(failure)
        settled.set()

    beside = Beside(torch.device("cpu"), "beside")
    beside.do(Later(work), settle)
    assert settled.wait(10)
    beside.close()
    assert beside._thread is not None
    beside._thread.join(10)
    assert failures[0] is not None
    assert failures[0].reason is Reason.MEMORY_FULL
    assert copies[0]() is None
