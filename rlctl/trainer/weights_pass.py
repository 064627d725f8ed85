"""Going through a trainer's weights once: in a thread of its own, and to the end, since gathering takes every rank."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.finite import Held, local_values
from rlctl.weights.tensor.source import WeightSource, as_source, atomic_lists, is_stable, spares_of
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.tied_names import Spare

T = TypeVar("T")


class Pass:
    """Weights that are gone through once, and to their end also where what is done with them fails half way: the other
    ranks of the trainer wait in every gather, and another pass can only begin where all have ended this one.

    Attributes:
        moved: when the last tensor came, on :func:`time.monotonic`'s clock.
    """

    def __init__(self, weights: WeightSource | None = None) -> None:
        self.moved = time.monotonic()
        self._weights = as_source([]) if weights is None else weights
        self._rest: Iterator[tuple[str, torch.Tensor]] | None = None
        self.stable = is_stable(self._weights)

    def metas(self) -> list[TensorMeta]:
        """The weights'."""
        return self._weights.metas()

    def together(self) -> list[tuple[str, ...]]:
        """The weights'."""
        return atomic_lists(self._weights)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights'; once."""
        self._rest = iter(self._weights.tensors()) if self._rest is None else self._rest
        for pair in self._rest:
            self.moved = time.monotonic()
            yield pair

    def finish(self) -> None:
        """Go through what is left. What they raise has been raised before, or matters to nobody any more."""
        with contextlib.suppress(BaseException):
            deque(self.tensors(), maxlen=0)


class Described:
    """A source whose tensors have been described: it is not asked again."""

    def __init__(self, source: WeightSource) -> None:
        self.stable = is_stable(source)
        self._source = source
        self._metas = source.metas()
        self._together = atomic_lists(source)
        self._spares = spares_of(source)

    def metas(self) -> list[TensorMeta]:
        """The source's."""
        return list(self._metas)

    def spares(self) -> dict[str, Spare]:
        """The source's."""
        return dict(self._spares)

    def together(self) -> list[tuple[str, ...]]:
        """The source's."""
        return list(self._together)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's."""
        return self._source.tensors()

    def local(self) -> Iterator[Held] | None:
        """The source's."""
        return local_values(self._source)


def in_thread(
    work: Callable[[], T], then: Callable[[], None], name: str
) -> tuple[asyncio.Future[T], asyncio.Future[None]]:
    """Run blocking work in a daemon thread: one that hangs keeps neither the loop nor the interpreter from ending.

    What comes of it, and the thread's end, before which ``then`` is done.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # retrieved: whoever stopped the attempt no longer waits
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def tell(callback: Callable[..., None], *arguments: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback, *arguments)

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            failure = error
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                # Handed on as it is, it would end the loop, or be taken for a cancellation of whoever waits.
                failure = Reason.SOURCE_FAILED.error(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
        tell(settle, result, failure)
        then()
        tell(ended.set_result, None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future, ended
