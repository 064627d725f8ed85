"""Base class of engines in front of a server: lifecycle, requests, and the check whether a verb can run.

Admin methods run on the admin event loop; :meth:`ServerEngine.generate` and ``abort`` run on the generation loop.
"""

# ruff: noqa: ARG002 (the interface says which arguments a method has)
from __future__ import annotations

import abc
import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ParamSpec, Protocol, TypeVar

from rlctl.contract.decode_check import Calibration
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, Engine, EngineConfig, HttpExchange, HttpRequest
from rlctl.v1 import common_pb2, fleet_pb2, rollout_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl_servers.adapters.adapters import Adapters
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.probe import Prober, Turn
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.server import Server
from rlctl_servers.server.state import ServerState, update_open
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.rank_calls import Met
from rlctl_servers.updates.updates import Ranks, Updates
from rlctl_servers.updates.version_labels import Stamps

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

IDLE_S = 0.05
"""Interval in seconds of the check whether aborted requests have ended."""

RANKS_CHECK = (
    verbs_pb2.CHECK_ACTION_UNSPECIFIED,
    verbs_pb2.CHECK_ACTION_CHECKSUM,
    verbs_pb2.CHECK_ACTION_READ,
)
"""Actions of the checker that the ranks carry out."""

COMPUTED = (verbs_pb2.CHECK_ACTION_PROBE, verbs_pb2.CHECK_ACTION_DECODE)
"""Actions of the checker that the server computes like requests."""

INTERRUPT_S = 10.0
"""Seconds that a broadcast of an aborted update may take to end. Its source has left the group by then."""


def takes_turn(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a verb wait until no probe has lifted the pause. Raises DEADLINE_EXCEEDED."""

    @functools.wraps(method)
    async def waiting(*args: P.args, **kwargs: P.kwargs) -> T:
        engine, _, call = args
        assert isinstance(engine, ServerEngine)
        assert isinstance(call, Call)
        async with engine.turn.acquired(call):
            return await method(*args, **kwargs)

    return waiting


class Facts(Protocol):
    """Facts that a server reported after its start."""

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Return the reasons of unsupported verbs, by verb."""

    @property
    def no_decode_check(self) -> str:
        """Return why decode cannot be compared with prefill, or ""."""

    def server_info(self, name: str, node: str, pid: int, uptime_s: float) -> verbs_pb2.ServerInfo:
        """Return how the server was started, without its keys."""


class Ending(Protocol):
    """Requests at the server that can be ended."""

    @property
    def active(self) -> int: ...

    @property
    def samples(self) -> int:
        """Return the number of samples of the active requests."""

    async def abort(self, rids: Sequence[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        """End requests. Return their number, and the unknown ids."""


class ServerEngine(Engine):
    """One engine server with all of its ranks.

    A subclass sets ``_server``, ``_control`` and ``_state`` in its constructor. Its start sets ``_facts``, ``_stamps``,
    ``_requests``, ``_passing``, ``_ending``, ``_updates``, ``_adapters``, ``_prober`` (None: no probes), ``_ranks``
    (None: the server takes no tensors), ``_met`` and ``_layout`` (the ranks' coordinates). ``_ready`` is set last.
    """

    _server: Server
    _control: Control
    _state: ServerState
    _facts: Facts
    _stamps: Stamps
    _requests: Requests
    _passing: Passing
    _ending: Ending
    _updates: Updates
    _adapters: Adapters
    _prober: Prober | None
    _ranks: Ranks | None
    _met: Met
    _layout: Sequence[WorkerCoordinates]

    def __init__(
        self,
        config: EngineConfig,
        on_failure: Callable[[RlctlError], None],
        product: str,
        allowed_roots: tuple[str, ...],
    ) -> None:
        """``allowed_roots``: see :class:`Checkpoints`."""
        self._on_failure = on_failure
        self.turn = Turn()
        self._checkpoints = Checkpoints(product, config.model_path, allowed_roots)
        if config.dtype == "auto":
            # The servers' own "auto" loads a float32 checkpoint in half of its precision.
            config = dataclasses.replace(config, dtype=self._checkpoints.dtype or "auto")
        self._config = config
        self._failure: RlctlError | None = None
        self._ready = False
        self._calibration: Calibration | None = None  # of the decode check; None: no checks
        self._since = time.monotonic()

    # The life of the engine.

    def setup(self) -> dict[str, str]:
        """Return nothing, since a server engine has no followers."""
        return {}

    async def stop(self) -> None:
        """End a launched server and the calls that wait for the server. An attached server loses its adapters."""
        serves = self._ready and self._failure is None
        self._failure = self._failure or Reason.STAGE_NOT_SERVING.error("the engine was stopped")
        self._checkpoints.stop()
        try:
            if serves and not self._server.launched and "LoadAdapter" not in self._facts.unsupported:
                await self._adapters.leave()
        finally:
            await self._server.stop()

    def can_restart(self) -> bool:
        """Return whether the server was launched. An attached server cannot be started again."""
        return self._server.launched

    def log_lines(self) -> Sequence[str]:
        """Return the last log lines of a launched server."""
        return self._server.log_lines()

    def set_version(self, version: common_pb2.WeightVersion) -> None:
        """Bind the version to the server's present label."""
        if self._ready:
            self._stamps.bind(version)

    def present_version(self) -> common_pb2.WeightVersion:
        return self._stamps.present

    def _failed(self, error: RlctlError) -> None:
        """Report the end of the server, from any thread."""
        if self._failure is None:
            self._failure = error
            self._on_failure(error)

    def _wedged(self, error: RlctlError) -> None:
        self._failed(error)
        self._server.kill()

    def _check(self, verb: str) -> None:
        """Raise if the engine has failed or has not started, or if the verb is unsupported."""
        if self._failure is not None:
            raise self._failure.reason.error(self._failure.message, outcome=OUTCOME_REJECTED)
        if not self._ready:
            raise Reason.ILLEGAL_STATE.error(
                "the engine has not started yet", next_step="Repeat the call after the engine has started."
            )
        reason = self._facts.unsupported.get(verb)
        if reason:
            raise Reason.UNSUPPORTED.error(f"{verb}: {reason}", outcome=OUTCOME_SKIPPED)

    async def _calibrate(self, capabilities: fleet_pb2.Capabilities, call: Call) -> None:
        """Calibrate the decode check with the weights of the start, and add its time to the capabilities.

        A server without a calibration starts all the same, and makes no checks.
        """
        try:
            if self._facts.no_decode_check:
                raise Reason.UNSUPPORTED.error(self._facts.no_decode_check)
            if self._prober is None:
                return
            self._calibration = await self._prober.calibrate(self._config.dtype, call)
        except Exception as error:
            if self._failure is not None:
                raise
            message = error.message if isinstance(error, RlctlError) else f"{type(error).__name__}: {error}"
            log.warning("decode checks are off: %s", message)
            capabilities.unsupported["decode_check"] = message
            return
        capabilities.check_actions.append(verbs_pb2.CHECK_ACTION_DECODE)
        capabilities.decode_check_time.CopyFrom(duration(self._calibration.seconds))

    def _staged(self) -> bool:
        """Return whether updates can be staged, and log the reason if not."""
        if self._met.unstaged:
            log.info("%s's updates are not staged: %s", self._state.product, self._met.unstaged)
        return not self._met.unstaged

    # Requests.

    @abc.abstractmethod
    async def _loads(self, call: Call) -> verbs_pb2.Loads:
        """Return the running and waiting requests at the server, including requests of other callers."""

    async def generate(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        self._check("")
        async with aclosing(self._requests.generate(request)) as parts:
            async for part in parts:
                yield part

    async def exchange(self, request: HttpRequest) -> HttpExchange:
        try:
            self._check("")
        except RlctlError as error:  # a client or proxy tries another stage
            raise Reason.STAGE_NOT_SERVING.error(error.message) from error
        return self._passing.read(request)

    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        self._check("")
        aborted, unknown = await self._requests.abort(list(request.rids), all_of_them=request.abort_all)
        return rollout_pb2.AbortResponse(aborted=aborted, unknown_rids=unknown)

    async def abort_requests(self, request: verbs_pb2.AbortRequestsRequest, call: Call) -> verbs_pb2.AbortReport:
        self._check("AbortRequests")
        aborted, unknown = await self._ending.abort(list(request.rids), all_of_them=request.abort_all)
        return verbs_pb2.AbortReport(aborted=aborted, unknown_rids=unknown)

    async def get_loads(self, request: verbs_pb2.GetLoadsRequest, call: Call) -> verbs_pb2.Loads:
        self._check("GetLoads")
        return await self._loads(call)

    async def _active(self, call: Call) -> int:
        """Return the number of active requests, for an attached server including requests of other callers."""
        active = self._ending.active
        if not self._server.launched:
            loads = await self._loads(call)
            active = max(active, loads.running + loads.waiting)
        return active

    async def _settle(self, call: Call, *, abort: bool) -> None:
        """Raise ACTIVE_REQUESTS for active requests, or end them if ``abort``. Raises DEADLINE_EXCEEDED."""
        active = await self._active(call)
        if active and not abort:
            raise Reason.ACTIVE_REQUESTS.error(f"{active} requests are active", metadata={"count": str(active)})
        if active:
            await self._ending.abort([], all_of_them=True)
            while self._ending.active:
                if asyncio.get_running_loop().time() > call.deadline:
                    raise Reason.DEADLINE_EXCEEDED.error("the requests did not end in time")
                await asyncio.sleep(IDLE_S)

    # Generation and what stops it.

    @takes_turn
    async def pause_generation(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        """Pause the server, or the requests with one adapter."""
        self._check("PauseGeneration")
        if not request.adapter:
            await self._pause(request, call)
            return
        self._check("LoadAdapter")
        call.accept()
        await self._adapters.pause(request, call, stopped=self._state.stopped)

    @takes_turn
    async def continue_generation(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        """Continue the server, also from the plug-in's own pause, or the requests with one adapter."""
        self._check("ContinueGeneration")
        if request.adapter:
            self._check("LoadAdapter")
            call.accept()
            self._adapters.go_on(request.adapter)
            return
        self._state.refuse_continue(updating=self._updates.in_place)
        call.accept()
        await self._go_on(request, call)
        self._state.paused, self._state.holding = common_pb2.PAUSE_MODE_UNSPECIFIED, False
        self._requests.release()
        self._adapters.sweep_soon()

    @takes_turn
    async def release_memory(self, request: verbs_pb2.ReleaseMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        self._check("ReleaseMemory")
        self._refuse_during_update()
        call.accept()
        report = await self._release(request, await self._active(call), call)
        if common_pb2.MEMORY_TAG_KV_CACHE in report.released:
            self._stamps.flushed()
        return report

    @abc.abstractmethod
    async def _pause(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        """Pause the server, and record its mode."""

    @abc.abstractmethod
    async def _go_on(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        """Let the server continue."""

    @abc.abstractmethod
    async def _release(
        self, request: verbs_pb2.ReleaseMemoryRequest, active: int, call: Call
    ) -> verbs_pb2.MemoryReport:
        """Release memory. ``active``: number of active requests."""

    # Adapters.

    async def load_adapter(self, request: verbs_pb2.LoadAdapterRequest, call: Call) -> verbs_pb2.AdapterList:
        """Read an adapter into the open adapter update."""
        self._check("LoadAdapter")
        call.accept()
        return await self._adapters.load(request, call)

    @takes_turn
    async def seal_update(
        self, request: verbs_pb2.SealUpdateRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        """Complete the shadow copies, or stop the requests with the adapter that the open update replaces."""
        self._check("SealUpdate")
        call.accept()
        if self._adapters.open:
            return await self._adapters.seal(call)
        return await self._updates.seal(request, call)

    async def unload_adapter(self, request: verbs_pb2.UnloadAdapterRequest, call: Call) -> verbs_pb2.AdapterList:
        self._check("UnloadAdapter")
        self._refuse_during_update()
        call.accept()
        return await self._adapters.drop(request, call)

    async def list_adapters(self, request: verbs_pb2.ListAdaptersRequest, call: Call) -> verbs_pb2.AdapterList:
        self._check("ListAdapters")
        return self._adapters.listed

    async def _take_over(self, call: Call) -> None:
        """Unload the adapters that an earlier stage server has left at an attached server."""
        if not self._server.launched and "LoadAdapter" not in self._facts.unsupported:
            await self._adapters.take_over(call)

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
            raise update_open()

    # Weights.

    @takes_turn
    async def prepare_update(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Open an update.

        Raises ACTIVE_REQUESTS for active requests, except for a staged update, during a pause, and for an update that
        ends all requests.
        """
        self._check("PrepareUpdate")
        call.accept()
        if common_pb2.MEMORY_TAG_WEIGHTS in self._state.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be written")
        if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
            return await self._prepare_adapter(request, call)
        self._refuse_beside_adapter()
        self._updates.refuse(request, call)
        if not self._state.stopped and request.apply != verbs_pb2.APPLY_MODE_STAGED:
            await self._settle(call, abort=request.abort_all_requests)
        return await self._updates.prepare(request, call)

    async def init_weights_update_group(
        self, request: verbs_pb2.InitWeightsUpdateGroupRequest, call: Call
    ) -> list[RankResult]:
        """Join the ranks into a group. The server computes nothing while the ranks wait for the other group members."""
        ranks = self._ranks_for("InitWeightsUpdateGroup")
        reports = await ranks.each("InitWeightsUpdateGroup", request, verbs_pb2.GroupReport, call)
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK, group=report)
            for rank, report in zip(self._layout, reports, strict=True)
        ]

    async def destroy_weights_update_group(
        self, request: verbs_pb2.DestroyWeightsUpdateGroupRequest, call: Call
    ) -> None:
        """Leave a group after the end of a broadcast in the group."""
        ranks = self._ranks_for("DestroyWeightsUpdateGroup")
        if not await self._received(call.deadline - asyncio.get_running_loop().time()):
            raise Reason.RANK_SILENT.error("a broadcast keeps the ranks in the group", outcome=OUTCOME_UNKNOWN)
        await ranks.each("DestroyWeightsUpdateGroup", request, verbs_pb2.DestroyWeightsUpdateGroupRequest, call)

    @takes_turn
    async def update_weights_from_distributed(
        self, request: verbs_pb2.UpdateWeightsFromDistributedRequest, call: Call
    ) -> list[RankResult]:
        self._check("UpdateWeightsFromDistributed")
        call.accept()
        return await self._updates.from_distributed(request, call)

    @takes_turn
    async def update_weights_from_tensor(
        self, request: verbs_pb2.UpdateWeightsFromTensorRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        """Copy tensors of the weights or of an adapter out of shared segments."""
        self._check("UpdateWeightsFromTensor")
        if self._adapters.open:
            call.accept()
            return await self._adapters.take(request, call)
        call.accept()
        return await self._updates.from_tensor(request, call)

    @takes_turn
    async def update_weights_from_disk(
        self, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        self._check("UpdateWeightsFromDisk")
        call.accept()
        return await self._updates.from_disk(request, call)

    async def _refuse_swap(self, call: Call) -> None:
        """Raise ACTIVE_REQUESTS if a staged update would change the weights under requests that are not paused."""
        if self._updates.staged and not self._state.stopped:
            await self._settle(call, abort=False)

    @takes_turn
    async def commit_update(
        self, request: verbs_pb2.CommitUpdateRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        """Close the update. The version label of the server changes last."""
        self._check("CommitUpdate")
        call.accept()
        if self._adapters.open:
            return await self._adapters.commit(call)
        await self._refuse_swap(call)
        label = self._stamps.of(request.version)
        self._stamps.bind(request.version, label)
        report = await self._commit(request, label, call)
        if request.adapters == verbs_pb2.ADAPTER_POLICY_DROP:
            await self._adapters.drop_all()
        return report

    @abc.abstractmethod
    async def _commit(
        self, request: verbs_pb2.CommitUpdateRequest, label: str, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        """Make the server serve the new weights under this label. Raises as :meth:`Updates.commit`."""

    async def abort_update(self, request: verbs_pb2.AbortUpdateRequest, call: Call) -> None:
        self._check("AbortUpdate")
        call.accept()
        if self._adapters.open:
            await self._adapters.abort(call)
            return
        await self._updates.abort(call)

    async def send_weights(self, request: verbs_pb2.SendWeightsRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Broadcast the weights of the ranks between two steps. The server generates nothing meanwhile."""
        ranks = self._ranks_for("SendWeights")
        self._refuse_during_update()
        if common_pb2.MEMORY_TAG_WEIGHTS in self._state.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be sent")
        reports = await ranks.each("SendWeights", request, verbs_pb2.WeightsReport, call)
        return reports[0]

    async def check_weights(
        self, request: verbs_pb2.CheckWeightsRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.CheckReport:
        """Digest or read the weights of the ranks, digest an adapter, or compute a probe or decode check.

        Raises UNSUPPORTED (SKIPPED).
        """
        if request.adapter:
            self._check("ListAdapters")
            return self._adapters.check(request, self._layout)
        if request.action in COMPUTED and self._prober is not None:
            self._check("")
            if self._updates.in_place:
                raise update_open()
            call.accept()
            if request.action == verbs_pb2.CHECK_ACTION_PROBE:
                prompts = await self._prober.probe(request.prompts, call)
                return verbs_pb2.CheckReport(action=request.action, probed=prompts)
            if self._calibration is not None:
                decode = await self._prober.check_decode(self._calibration, call)
                return verbs_pb2.CheckReport(action=request.action, decode=decode)
        self._check("CheckWeights")
        if request.action not in RANKS_CHECK:
            actions = verbs_pb2.CheckAction
            name = actions.Name(request.action) if request.action in actions.values() else request.action
            raise Reason.UNSUPPORTED.error(
                f"{self._server.http.product} does not check weights by {name}",
                field="action",
                outcome=OUTCOME_SKIPPED,
            )
        return await self._check_ranks(request, call)

    async def _check_ranks(self, request: verbs_pb2.CheckWeightsRequest, call: Call) -> list[RankResult]:
        """Digest or read the weights that the ranks compute with. Raises DIGEST_MISMATCH."""
        ranks = self._ranks_for("CheckWeights")
        if common_pb2.MEMORY_TAG_WEIGHTS in self._state.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be digested")
        call.accept()
        reports = await ranks.each("CheckWeights", request, verbs_pb2.CheckReport, call)
        digest = reports[0].model_digest
        if request.expected_digest and digest != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": digest},
            )
        return [
            RankResult(coordinates=rank, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_RANK, check=report)
            for rank, report in zip(self._layout, reports, strict=True)
        ]

    async def _received(self, timeout_s: float) -> bool:
        """Wait until the ranks receive nothing. Return False if ``timeout_s`` ends first."""
        return await self._updates.received(timeout_s)

    async def interrupt(self, update_id: str) -> None:
        """Wait for the end of a broadcast, and give the server up after INTERRUPT_S: no call reaches its ranks.

        The background receive of a staged update is ended.
        """
        if not self._ready or not update_id:
            return
        await self._updates.interrupt(Call("interrupt", asyncio.get_running_loop().time() + INTERRUPT_S, update_id))
        if not await self._received(INTERRUPT_S):
            self._control.wedged("a broadcast whose update was aborted")

    def _ranks_for(self, verb: str) -> Ranks:
        self._check(verb)
        assert self._ranks is not None
        return self._ranks

    # Checkpoints and reads.

    async def inspect_checkpoint(
        self, request: verbs_pb2.InspectCheckpointRequest, call: Call
    ) -> verbs_pb2.CheckpointReport:
        self._check("InspectCheckpoint")
        return await asyncio.to_thread(
            self._checkpoints.inspect, request.model_path, request.load_format, request.target_modules
        )

    async def pull_weights(self, request: verbs_pb2.PullWeightsRequest, call: Call) -> verbs_pb2.PullReport:
        """Fetch a published version while the engine generates."""
        self._check("PullWeights")
        remaining = call.deadline - asyncio.get_running_loop().time()
        return await asyncio.to_thread(self._checkpoints.pull, request, remaining)

    async def get_server_info(self, request: verbs_pb2.GetServerInfoRequest, call: Call) -> verbs_pb2.ServerInfo:
        self._check("GetServerInfo")
        uptime = time.monotonic() - self._since
        return self._facts.server_info(self.name, self._config.node, self._server.pid, uptime)
