"""The SDK for blocking code: every method of :class:`rlctl.sdk.aio.AsyncFleet`, run on a background loop."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack

from rlctl.rollout.rollout import AsyncRollout
from rlctl.runtime.event_loops import LoopThread, cancel_others
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.sdk.sglang_names import AsyncEngine
from rlctl.transport.tls.credentials import Tls

if TYPE_CHECKING:
    from rlctl.trainer.publisher import Publisher

P = ParamSpec("P")
R = TypeVar("R")
A_co = TypeVar("A_co", covariant=True)


class _OnLoop(Generic[A_co]):
    """An asyncio object and the background loop that runs the object."""

    def __init__(self, aio: A_co, loop: LoopThread) -> None:
        self.aio = aio
        self.loop = loop


def connect(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | Literal[False] | None = None,
    timeout_s: float = aio.CONNECT_S,
    client: str = "sdk",
) -> Fleet:
    """Connect to a coordinator at ``host:port`` or ``unix:PATH``.

    The token is the argument, else RLCTL_TOKEN_FILE, else RLCTL_TOKEN, else none. ``tls``: by default the files in
    RLCTL_TLS_CA, RLCTL_TLS_CERT and RLCTL_TLS_KEY, plain text without them; False: plain text. ``client``: name of the
    program, recorded in operations. Raises UNREACHABLE, TLS_FAILED, TLS_INVALID; FIELD_INVALID for any other form of
    address.
    """
    loop = LoopThread("rlctl client")
    try:
        return Fleet(loop.call(aio.connect(address, token=token, tls=tls, timeout_s=timeout_s, client=client)), loop)
    except BaseException:
        loop.stop()
        raise


def _blocking(
    method: Callable[Concatenate[A_co, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_OnLoop[A_co], P], R]:
    @functools.wraps(method)
    def call(self: _OnLoop[A_co], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.loop.call(method(self.aio, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncFleet, P], AsyncIterator[R]],
) -> Callable[Concatenate[Fleet, P], Generator[R, None, None]]:
    @functools.wraps(method)
    def call(self: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        items: _Items[R] = _Items(method(self.aio, *args, **kwargs))
        try:
            while True:
                try:
                    yield self.loop.call(items.step())
                except StopAsyncIteration:
                    return
        finally:
            self.loop.finish(items.close())

    return call


class _Items(Generic[R]):
    """An asynchronous iterator on the background loop, stepped from a thread that may be interrupted."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self._stepping: asyncio.Task[Any] | None = None

    async def step(self) -> R:
        self._stepping = asyncio.current_task()
        try:
            item: R = await anext(self._items)
            return item
        finally:
            self._stepping = None

    async def close(self) -> None:
        # An interrupt may leave a running step without a waiter; the iterator cannot be closed during a step.
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        await self._items.aclose()


class Fleet(_OnLoop[AsyncFleet]):
    """A fleet, through the coordinator. See :class:`rlctl.sdk.aio.AsyncFleet` for every method.

    Safe to use from several threads. Close it, or use it as a context manager.
    """

    def __init__(self, aio: AsyncFleet, loop: LoopThread) -> None:
        """Use :func:`connect`."""
        super().__init__(aio, loop)
        self._closing = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel open calls and close the connection. A second call is a no-op.

        Waits up to 10 s for updates in commit; aborts other updates.
        """
        if not self.loop.running:
            return
        with self._closing:
            if self.loop.running:  # no other thread has closed the fleet meanwhile
                self.loop.call(self._close())
                self.loop.stop()

    async def _close(self) -> None:
        await self.aio.committed()
        await cancel_others()  # while the coordinator is still reachable
        await self.aio.close()

    call = _blocking(AsyncFleet.call)
    pause_generation = _blocking(AsyncFleet.pause_generation)
    continue_generation = _blocking(AsyncFleet.continue_generation)
    abort_requests = _blocking(AsyncFleet.abort_requests)
    flush_cache = _blocking(AsyncFleet.flush_cache)
    release_memory = _blocking(AsyncFleet.release_memory)
    resume_memory = _blocking(AsyncFleet.resume_memory)
    check_weights = _blocking(AsyncFleet.check_weights)
    update_weights_from_disk = _blocking(AsyncFleet.update_weights_from_disk)
    load_adapter = _blocking(AsyncFleet.load_adapter)
    unload_adapter = _blocking(AsyncFleet.unload_adapter)
    list_adapters = _blocking(AsyncFleet.list_adapters)
    generate = _blocking(AsyncFleet.generate)
    generate_batch = _blocking(AsyncFleet.generate_batch)
    generate_stream = _iterating(AsyncFleet.generate_stream)
    status = _blocking(AsyncFleet.status)
    models = _blocking(AsyncFleet.models)
    stages = _blocking(AsyncFleet.stages)
    watch = _iterating(AsyncFleet.watch)
    backup_journal = _iterating(AsyncFleet.backup_journal)
    operation = _blocking(AsyncFleet.operation)
    operations = _blocking(AsyncFleet.operations)
    audit = _blocking(AsyncFleet.audit)
    cancel_operation = _blocking(AsyncFleet.cancel_operation)
    abort_update = _blocking(AsyncFleet.abort_update)
    heal = _blocking(AsyncFleet.heal)
    set_enabled = _blocking(AsyncFleet.set_enabled)
    versions = _blocking(AsyncFleet.versions)
    rollback = _blocking(AsyncFleet.rollback)
    busy = _blocking(AsyncFleet.busy)
    drain = _blocking(AsyncFleet.drain)
    deregister = _blocking(AsyncFleet.deregister)
    report_engine_failure = _blocking(AsyncFleet.report_engine_failure)
    admit = _blocking(AsyncFleet.admit)
    take_over = _blocking(AsyncFleet.take_over)
    set_healing = _blocking(AsyncFleet.set_healing)
    set_min_healthy = _blocking(AsyncFleet.set_min_healthy)

    def engine(self, slot: str) -> Engine:
        """Return an engine with the method names of SGLang's own API. Raises STAGE_NOT_FOUND."""
        return Engine(self.loop.call(self.aio.engine(slot)), self.loop)

    def rollout(self, model: str, **settings: Unpack[aio.Rollouts]) -> Rollout:
        """Return a rollout of a model; see :meth:`rlctl.sdk.aio.AsyncFleet.rollout`."""
        return Rollout(self.aio.rollout(model, **settings), self.loop)

    def publisher(self, model: str, **settings: Any) -> Publisher:
        """Return the publisher of a model for this process; see :class:`rlctl.trainer.publisher.Publisher`."""
        from rlctl.trainer.publisher import Publisher  # loads torch

        return Publisher(self.aio.publisher(model, **settings), self.loop)


class Rollout(_OnLoop[AsyncRollout]):
    """Samples of a model. See :class:`rlctl.rollout.rollout.AsyncRollout` for every method."""

    generate = _blocking(AsyncRollout.generate)
    generate_batch = _blocking(AsyncRollout.generate_batch)
    generate_until = _blocking(AsyncRollout.generate_until)
    resume = _blocking(AsyncRollout.resume)
    finish_session = _blocking(AsyncRollout.finish_session)

    @property
    def latest(self) -> int:
        """Sequence of the model's latest version, as last reported by the coordinator; 0: not known yet."""
        return self.aio.latest


class Engine(_OnLoop[AsyncEngine]):
    """An engine of a fleet. See :class:`rlctl.sdk.sglang_names.AsyncEngine` for every method."""

    generate = _blocking(AsyncEngine.generate)
    abort_request = _blocking(AsyncEngine.abort_request)
    pause_generation = _blocking(AsyncEngine.pause_generation)
    continue_generation = _blocking(AsyncEngine.continue_generation)
    flush_cache = _blocking(AsyncEngine.flush_cache)
    release_memory_occupation = _blocking(AsyncEngine.release_memory_occupation)
    resume_memory_occupation = _blocking(AsyncEngine.resume_memory_occupation)
    update_weights_from_disk = _blocking(AsyncEngine.update_weights_from_disk)
    update_weights_from_tensor = _blocking(AsyncEngine.update_weights_from_tensor)
    update_weights_from_distributed = _blocking(AsyncEngine.update_weights_from_distributed)
    init_weights_update_group = _blocking(AsyncEngine.init_weights_update_group)
    destroy_weights_update_group = _blocking(AsyncEngine.destroy_weights_update_group)
    load_lora_adapter = _blocking(AsyncEngine.load_lora_adapter)
    unload_lora_adapter = _blocking(AsyncEngine.unload_lora_adapter)
    get_model_info = _blocking(AsyncEngine.get_model_info)
    get_server_info = _blocking(AsyncEngine.get_server_info)
    get_weights_by_name = _blocking(AsyncEngine.get_weights_by_name)


def publisher(fleet: Fleet | None, model: str, **settings: Any) -> Publisher:
    """Return the publisher of a model for this process; ``fleet`` is None at trainer ranks other than 0.

    ``settings`` are the arguments of :class:`rlctl.trainer.publisher.AsyncPublisher`.
    """
    from rlctl.trainer.publisher import AsyncPublisher, Publisher  # loads torch

    if fleet is not None:
        return fleet.publisher(model, **settings)
    return Publisher(AsyncPublisher(None, model, **settings), LoopThread("rlctl publisher"), owns_loop=True)
