"""What engines that stand before a server have in common: their life, their requests, whether a verb can be done.

Admin methods run on the admin event loop, :meth:`ServerEngine.generate` and ``abort`` on another one.
"""

# ruff: noqa: ARG002 (the interface says which arguments a method has)
from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec, Protocol, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, Engine, EngineConfig
from rlctl.v1 import common_pb2, rollout_pb2, verbs_pb2
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_SKIPPED
from rlctl_servers.adapters.adapters import Adapters
from rlctl_servers.requests.probe import Turn
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.server import Server
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.version_labels import Stamps

P = ParamSpec("P")
T = TypeVar("T")

IDLE_S = 0.05
"""How often an engine that ends requests looks whether they have ended."""


def takes_turn(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A verb that must not come between a probe's lifting of a pause and its end. Raises DEADLINE_EXCEEDED."""

    @functools.wraps(method)
    async def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        engine, _, call = args
        assert isinstance(engine, ServerEngine)
        assert isinstance(call, Call)
        async with engine.turn.taken(call):
            return await method(*args, **kwargs)

    return waiting


class Facts(Protocol):
    """What a server said of itself after its start."""

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Why a verb cannot be done, by verb."""

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> verbs_pb2.ServerInfo:
        """How it was started, without its keys."""


class Ending(Protocol):
    """Requests at the server, and what ends them."""

    @property
    def active(self) -> int:
        """Requests that have not ended."""

    @property
    def samples(self) -> int:
        """Their samples."""

    async def abort(self, rids: Sequence[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        """End requests: how many, and the ids that were not found."""


class Updates(Protocol):
    """Updates of the base weights."""

    @property
    def open(self) -> bool:
        """Whether one is open."""


class ServerEngine(Engine):
    """One engine server, with all of its ranks.

    A subclass sets ``_server`` and ``_control`` when it is made; ``_facts``, ``_stamps``, ``_requests``,
    ``_ending``, ``_updates`` and ``_adapters`` when it starts, and ``_ready`` last.
    """

    _server: Server
    _control: Control
    _facts: Facts
    _stamps: Stamps
    _requests: Requests
    _ending: Ending
    _updates: Updates
    _adapters: Adapters

    def __init__(
        self,
        config: EngineConfig,
        on_failure: Callable[[RlctlError], None],
        product: str,
        allowed_roots: tuple[str, ...],
    ) -> None:
        """``allowed_roots``: as :class:`Checkpoints` takes them."""
        self._on_failure = on_failure
        self.turn = Turn()
        self._checkpoints = Checkpoints(product, config.model_path, allowed_roots)
        if config.dtype == "auto":
            # The servers' own "auto" holds a float32 checkpoint in half of its precision.
            config = dataclasses.replace(config, dtype=self._checkpoints.dtype or "auto")
        self._config = config
        self._failure: RlctlError | None = None
        self._ready = False
        self._since = time.monotonic()

    # The life of the engine.

    def setup(self) -> dict[str, str]:
        """There are no followers."""
        return {}

    async def stop(self) -> None:
        """End the server if it was launched, and whatever waits for it."""
        self._failure = self._failure or Reason.STAGE_NOT_SERVING.error("the engine was stopped")
        self._checkpoints.stop()
        await self._server.stop()

    def can_restart(self) -> bool:
        """A server that was launched can be launched again."""
        return self._server.launched

    def log_lines(self) -> Sequence[str]:
        """What a server that was launched has logged last."""
        return self._server.log_lines()

    def set_version(self, version: common_pb2.WeightVersion) -> None:
        """What the server's present label stands for."""
        if self._ready:
            self._stamps.bind(version)

    def _failed(self, error: RlctlError) -> None:
        """The server is gone; from any thread."""
        if self._failure is None:
            self._failure = error
            self._on_failure(error)

    def _wedged(self, error: RlctlError) -> None:
        self._failed(error)
        self._server.kill()

    def _check(self, verb: str) -> None:
        """Raise why nothing, or not this verb, can be done."""
        if self._failure is not None:
            raise self._failure.reason.error(self._failure.message, outcome=OUTCOME_REJECTED)
        if not self._ready:
            raise Reason.ILLEGAL_STATE.error("the engine has not started yet")
        why = self._facts.unsupported.get(verb)
        if why:
            raise Reason.UNSUPPORTED.error(f"{verb}: {why}", outcome=OUTCOME_SKIPPED)

    # Requests.

    @abc.abstractmethod
    async def _loads(self, call: Call) -> verbs_pb2.Loads:
        """What runs and waits at the server, others' requests too."""

    async def generate(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        """Generate; see :meth:`rlctl.engine.Engine.generate`."""
        self._check("")
        async with aclosing(self._requests.generate(request)) as parts:
            async for part in parts:
                yield part

    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        """End requests early."""
        self._check("")
        aborted, unknown = await self._requests.abort(list(request.rids), all_of_them=request.abort_all)
        return rollout_pb2.AbortResponse(aborted=aborted, unknown_rids=unknown)

    async def abort_requests(self, request: verbs_pb2.AbortRequestsRequest, call: Call) -> verbs_pb2.AbortReport:
        """End requests early."""
        self._check("AbortRequests")
        aborted, unknown = await self._ending.abort(list(request.rids), all_of_them=request.abort_all)
        return verbs_pb2.AbortReport(aborted=aborted, unknown_rids=unknown)

    async def get_loads(self, request: verbs_pb2.GetLoadsRequest, call: Call) -> verbs_pb2.Loads:
        """What runs and waits."""
        self._check("GetLoads")
        return await self._loads(call)

    async def _active(self, call: Call) -> int:
        """Requests that have not ended: of a server that others reach as well, theirs too."""
        active = self._ending.active
        if not self._server.launched:
            told = await self._loads(call)
            active = max(active, told.running + told.waiting)
        return active

    async def _settle(self, call: Call, *, abort: bool) -> None:
        """Refuse while requests are active, or end them. Raises ACTIVE_REQUESTS, DEADLINE_EXCEEDED."""
        active = await self._active(call)
        if active and not abort:
            raise Reason.ACTIVE_REQUESTS.error(f"{active} requests are active", metadata={"count": str(active)})
        if active:
            await self._ending.abort([], all_of_them=True)
            while self._ending.active:
                if asyncio.get_running_loop().time() > call.deadline:
                    raise Reason.DEADLINE_EXCEEDED.error("the requests did not end in time")
                await asyncio.sleep(IDLE_S)

    # Adapters.

    async def load_adapter(self, request: verbs_pb2.LoadAdapterRequest, call: Call) -> verbs_pb2.AdapterList:
        """Read an adapter into the open adapter update."""
        self._check("LoadAdapter")
        call.accept()
        return await self._adapters.load(request, call)

    @takes_turn
    async def seal_update(self, request: verbs_pb2.SealUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Stop the requests with the adapter that the open update replaces. Of weights there is no shadow copy."""
        self._check("SealUpdate")
        if not self._adapters.open:
            raise Reason.UPDATE_NOT_FOUND.error("no update of an adapter is open, and servers keep no shadow copy")
        call.accept()
        return await self._adapters.seal(call)

    async def unload_adapter(self, request: verbs_pb2.UnloadAdapterRequest, call: Call) -> verbs_pb2.AdapterList:
        """Forget an adapter."""
        self._check("UnloadAdapter")
        self._refuse_during_update()
        call.accept()
        return await self._adapters.drop(request, call)

    async def list_adapters(self, request: verbs_pb2.ListAdaptersRequest, call: Call) -> verbs_pb2.AdapterList:
        """The adapters that serve."""
        self._check("ListAdapters")
        return self._adapters.listed

    async def _prepare_adapter(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        self._check("LoadAdapter")
        if self._updates.open:
            raise Reason.UPDATE_IN_PROGRESS.error("an update of the base weights is open")
        return await self._adapters.prepare(request, call)

    def _refuse_beside_adapter(self) -> None:
        if self._adapters.open:
            raise Reason.UPDATE_IN_PROGRESS.error("an update of an adapter is open")

    def _refuse_during_update(self) -> None:
        if self._updates.open or self._adapters.open:
            raise Reason.ILLEGAL_STATE.error("a weight update is open: its end comes first")

    # Checkpoints and reads.

    async def inspect_checkpoint(
        self, request: verbs_pb2.InspectCheckpointRequest, call: Call
    ) -> verbs_pb2.CheckpointReport:
        """What a load from disk would find."""
        self._check("InspectCheckpoint")
        return await asyncio.to_thread(
            self._checkpoints.inspect, request.model_path, request.load_format, request.target_modules
        )

    async def pull_weights(self, request: verbs_pb2.PullWeightsRequest, call: Call) -> verbs_pb2.PullReport:
        """Fetch a published version beside generation."""
        self._check("PullWeights")
        remaining = call.deadline - asyncio.get_running_loop().time()
        return await asyncio.to_thread(self._checkpoints.pull, request, remaining)

    async def get_server_info(self, request: verbs_pb2.GetServerInfoRequest, call: Call) -> verbs_pb2.ServerInfo:
        """How the server was started."""
        self._check("GetServerInfo")
        uptime = time.monotonic() - self._since
        return self._facts.server_info(self.name, self._config.node, self._server.pid, uptime)
