"""A pass over a trainer's weights: in a thread, and always to the end, since gathering takes every rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pass:
    """A pass over weights that always reaches the end, also after a failure of the consumer.

    The trainer's other ranks wait in every gather, and the next pass can only begin after all ranks have ended this
    pass.

    Attributes:
        moved: time of the last tensor, on :func:`time.monotonic`'s clock.
    """

    def __init__(self, weights: WeightSource | None = None) -> None:
        self.moved = time.monotonic()
        self._weights = as_source([]) if weights is None else weights
        self._rest: Iterator[tuple[str, torch.Tensor]] | None = None
        self.stable = is_stable(self._weights)

    def metas(self) -> list[TensorMeta]:
        """Return the metas of the weights."""
        return self._weights.metas()

    def together(self) -> list[tuple[str, ...]]:
        """Return the atomic lists of the weights."""
        return atomic_lists(self._weights)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the weights; once."""
        self._rest = iter(self._weights.tensors()) if self._rest is None else self._rest
        for pair in self._rest:
            self.moved = time.monotonic()
            yield pair

    def finish(self) -> None:
        """Iterate over the remaining tensors. Errors were raised before, or no longer matter."""
        with contextlib.suppress(BaseException):
            deque(self.tensors(), maxlen=0)


class Described:
    """A source with stored metas, atomic lists and spare names: the source computes each once."""

    def __init__(self, source: WeightSource) -> None:
        self.stable = is_stable(source)
        self._source = source
        self._metas = source.metas()
        self._together = atomic_lists(source)
        self._spares = spares_of(source)

    def metas(self) -> list[TensorMeta]:
        """Return the metas of the source."""
        return list(self._metas)

    def spares(self) -> dict[str, Spare]:
        """Return the spare names of the source."""
        return dict(self._spares)

    def together(self) -> list[tuple[str, ...]]:
        """Return the atomic lists of the source."""
        return list(self._together)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the source."""
        return self._source.tensors()

    def local(self) -> Iterator[Held] | None:
        """Return the local values of the source."""
        return local_values(self._source)


def in_thread(
    work: Callable[[], T], then: Callable[[], None], name: str
) -> tuple[asyncio.Future[T], asyncio.Future[None]]:
    """Run blocking work in a daemon thread: a hanging thread blocks neither the loop nor the interpreter's exit.

    Returns futures of the result and of the thread's end. ``then`` runs in the thread before the end; its errors are
    logged.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # marks the error as retrieved: a stopped attempt no longer waits
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def tell(callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(callback, *arguments)

    def run() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - passed to the waiting task
            failure = error
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                # Passed on unchanged, the error would end the loop, or pass for a cancellation of the waiting task.
                failure = Reason.SOURCE_FAILED.error(f"{type(error).__name__}: {error}")
                failure.__cause__ = error
        tell(settle, result, failure)
        try:
            then()
        except Exception:
            log.exception("the end of %s", name)
        finally:
            tell(ended.set_result, None)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future, ended
