"""A trainer's publisher against an in-process fleet, where no tensor has to travel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rlctl.client import aio
from rlctl.errors import Reason, RlctlError
from rlctl.testing.fleet import InProcessFleet
from rlctl.weights.tensors import TensorMeta


class Source:
    """One tensor; a function is called before it is given."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta("w", torch.float32, (1,))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._happens()
        yield "w", torch.zeros(1)


async def test_a_sources_own_error_is_raised_as_it_is_and_only_the_deadline_is_called_one(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TimeoutError("the trainer's own gather")

    client = await aio.connect(fleet.server.address)
    publisher = client.publisher("actor")
    with pytest.raises(TimeoutError, match="own gather"):
        await publisher.update(Source(fail), version="never", checkpoint=checkpoint("two"))
    monkeypatch.setattr("rlctl.client.publisher.GRACE_S", 0.0)
    release = threading.Event()
    with pytest.raises(RlctlError) as caught:
        await publisher.update(Source(release.wait), version="late", checkpoint=checkpoint("two"), deadline_s=0.3)
    release.set()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await publisher.close()
    await client.close()
