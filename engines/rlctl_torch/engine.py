"""The torch engine behind the interface :class:`~rlctl.engine.Engine`.

Three threads meet here. Admin methods run on the admin event loop. :meth:`TorchEngine.generate` and ``abort`` run on a
second event loop. All work on the model happens in the engine thread (:mod:`rlctl_torch.step_loop`).
"""

# ruff: noqa: ARG002 (the interface says which arguments a method has)
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import ClassVar

from google.protobuf.message import Message
from torch._C._distributed_c10d import TCPStore

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_pair
from rlctl.engine import SETUP, Call, Engine, EngineConfig, EngineInfo
from rlctl.runtime.addresses import split
from rlctl.v1 import common_pb2, rollout_pb2, verbs_pb2
from rlctl.weights.group.network_interfaces import address_of
from rlctl.weights.group.process_group import LONGEST_S
from rlctl.weights.group.rank_groups import Groups, Membership
from rlctl_torch import info
from rlctl_torch.disaggregation.bootstrap import Rooms
from rlctl_torch.generation.scheduler import Scheduler
from rlctl_torch.options import float_dtype, parse_options
from rlctl_torch.rank import Rank
from rlctl_torch.requests.intake import Intake
from rlctl_torch.requests.prefill_decode import decode, prefill
from rlctl_torch.step_loop import StepLoop
from rlctl_torch.steps.collectives import Ranks, make_store
from rlctl_torch.steps.ordered_commands import Action, CommandStream, rejected
from rlctl_torch.verbs import adapters
from rlctl_torch.verbs.adapters import LoadAdapter, PrepareAdapter, Unload
from rlctl_torch.verbs.check_weights import Check
from rlctl_torch.verbs.load_from_disk import Disk, FromDisk
from rlctl_torch.verbs.memory import Release, Resume
from rlctl_torch.verbs.pause import Continue, ContinueAdapter, Flush, Pause, PauseAdapter
from rlctl_torch.verbs.send_weights import Send
from rlctl_torch.verbs.update import Abort, Commit, FromDistributed, FromTensor, Prepare, Seal

INTERRUPT_S = 0.3
"""Seconds kept back of a call's time, so that an interrupted operation still answers in time."""


class TorchEngine(Engine):
    """Engine for any attention-based causal language model of transformers, on CPU or GPU, tensor parallel."""

    name: ClassVar[str] = "torch"

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Check the settings. Raises FIELD_INVALID with the name of the wrong setting."""
        if not 0 <= config.rank < config.tp_size:
            raise Reason.FIELD_INVALID.error(f"rank {config.rank} of {config.tp_size}", field="rank")
        if config.dtype != "auto":
            float_dtype(config.dtype, "dtype")
        if not config.device.startswith(("cpu", "cuda")):
            raise Reason.FIELD_INVALID.error(f"device is {config.device!r}, not cpu or cuda", field="device")
        options = parse_options(config.options)
        self._config = config
        self._on_failure = on_failure
        self._ranks = Ranks(config.rank, config.tp_size)
        self._groups = Groups(address_of(config.node))
        self._rank = Rank(config, options, self._ranks, self._groups)
        self._mode = options.disaggregation_mode
        self._rooms: Rooms | None = None
        self._disk = Disk(self._rank)
        self._store: TCPStore | None = None
        self._commands = CommandStream(lambda: self._loop.wake())
        self._loop = StepLoop(self._rank, self._commands, self._join, self)
        self._setup: Mapping[str, str] = {}
        self._started: tuple[asyncio.AbstractEventLoop, asyncio.Future[EngineInfo]] | None = None
        self._since = time.monotonic()
        self._ready = False
        self._failure: RlctlError | None = None
        self._version = common_pb2.WeightVersion()

    # The life of the engine.

    def setup(self) -> dict[str, str]:
        """Open the store at which the ranks meet. A single rank needs no store."""
        if self._config.tp_size == 1:
            return {}
        self._store, address = make_store(self._config.node)
        return {"rendezvous": address}

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Join the other ranks, load and allocate. A failure raises the same error on every rank."""
        if self._config.rank > 0:
            split(setup.get("rendezvous", ""), SETUP)
        loop = asyncio.get_running_loop()
        self._setup = setup
        self._started = loop, loop.create_future()
        if self._mode == "prefill" and self._config.rank == 0:
            self._rooms = Rooms(address_of(self._config.node))
        self._loop.start()
        return await self._started[1]

    async def stop(self) -> None:
        """End the engine thread. Active requests and an unfinished start end with STAGE_NOT_SERVING."""
        if self._rooms is not None:
            self._rooms.close()
        self._groups.close()
        self._rank.segments.close()
        self._disk.stop()
        await asyncio.to_thread(self._loop.stop)
        stopped = Reason.STAGE_NOT_SERVING.error("the engine was stopped")
        self._end(stopped)
        self._tell_starter(lambda future: future.set_exception(stopped))

    async def order(self, command_id: str) -> int:
        """Put a registered command into the step stream and return its step; rank 0 only."""
        return await self._commands.order(command_id)

    async def withdraw(self, command_id: str) -> None:
        """Forget a command that is not in the stream."""
        self._commands.withdraw(command_id)

    async def interrupt(self, update_id: str) -> None:
        """Interrupt a receive of this update, and the formation of its groups."""
        if self._ready and update_id:
            self._groups.interrupt(update_id)
            self._rank.interrupt(update_id)

    def set_version(self, version: common_pb2.WeightVersion) -> None:
        """Stamp responses with this version from the next token on."""
        self._version = common_pb2.WeightVersion.FromString(version.SerializeToString())
        if self._rank.scheduler is not None:
            self._rank.scheduler.set_version(self._version)

    # Calls of the engine thread (rlctl_torch.step_loop.Listener).

    def started(self, model_digest: str) -> None:
        """Complete the start, as the rank is loaded."""
        rank = self._rank
        result = EngineInfo(
            layout=info.layout(rank, self._groups.store_address),
            capabilities=info.capabilities(rank, self.verbs()),
            checkpoint=rank.checkpoint,
            model_digest=model_digest,
            bootstrap=None if self._rooms is None else self._rooms.address,
        )
        self._intake = Intake(rank, info.end_tokens(rank))
        if rank.scheduler is not None:
            rank.scheduler.set_version(self._version)
        self._ready = True
        self._tell_starter(lambda future: future.set_result(result))

    def failed(self, error: RlctlError) -> None:
        """Fail the start, or report that a started rank can no longer work."""
        starting = not self._ready
        self._end(error)
        if starting:
            self._tell_starter(lambda future: future.set_exception(rejected(error)))
        else:
            self._on_failure(error)

    def _end(self, error: RlctlError) -> None:
        self._failure = self._failure or error
        self._commands.fail(error)
        if self._ready:
            self._rank.interrupt()
        self._rank.beside.close()
        if self._rank.scheduler is not None:
            self._rank.scheduler.fail(rejected(error))

    def _tell_starter(self, settle: Callable[[asyncio.Future[EngineInfo]], None]) -> None:
        if self._started is None:
            return
        loop, future = self._started
        # A closed loop has no waiting caller.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(future))

    def _join(self) -> None:
        self._ranks.join(self._setup, self._store, self._config.node, self._rank.device)

    # Verbs that the ranks carry out at one step.

    async def pause_generation(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        pause = PauseAdapter(self._rank, request) if request.adapter else Pause(self._rank, request)
        await self._ordered(pause, call)

    async def continue_generation(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        action = ContinueAdapter(self._rank, request) if request.adapter else Continue(self._rank, request)
        await self._ordered(action, call)

    async def flush_cache(self, request: verbs_pb2.FlushCacheRequest, call: Call) -> Message | None:
        return await self._ordered(Flush(self._rank, request), call)

    async def release_memory(self, request: verbs_pb2.ReleaseMemoryRequest, call: Call) -> Message | None:
        return await self._ordered(Release(self._rank, request), call)

    async def resume_memory(self, request: verbs_pb2.ResumeMemoryRequest, call: Call) -> Message | None:
        return await self._ordered(Resume(self._rank, request), call)

    async def check_weights(self, request: verbs_pb2.CheckWeightsRequest, call: Call) -> Message | None:
        return await self._ordered(Check(self._rank, request, call.update_id, self._ends(call)), call)

    async def prepare_update(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> Message | None:
        kind = PrepareAdapter if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER else Prepare
        return await self._ordered(kind(self._rank, request, call.update_id), call)

    async def update_weights_from_disk(
        self, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call
    ) -> Message | None:
        return await self._ordered(FromDisk(self._rank, request, call.update_id), call)

    async def update_weights_from_distributed(
        self, request: verbs_pb2.UpdateWeightsFromDistributedRequest, call: Call
    ) -> Message | None:
        """Receive buckets over groups. A receive that outlasts the call is interrupted."""
        deadline = self._ends(call) + INTERRUPT_S  # the interrupt comes first
        return await self._bounded(FromDistributed(self._rank, request, call.update_id, deadline), call)

    async def update_weights_from_tensor(
        self, request: verbs_pb2.UpdateWeightsFromTensorRequest, call: Call
    ) -> Message | None:
        """Read segments of shared memory. A read that outlasts the call is interrupted."""
        return await self._bounded(FromTensor(self._rank, request, call.update_id), call)

    async def seal_update(self, request: verbs_pb2.SealUpdateRequest, call: Call) -> Message | None:
        return await self._ordered(Seal(self._rank, call.update_id), call)

    async def commit_update(self, request: verbs_pb2.CommitUpdateRequest, call: Call) -> Message | None:
        return await self._ordered(Commit(self._rank, request, call.update_id), call)

    async def abort_update(self, request: verbs_pb2.AbortUpdateRequest, call: Call) -> None:
        await self._ordered(Abort(self._rank, call.update_id), call)

    async def load_adapter(self, request: verbs_pb2.LoadAdapterRequest, call: Call) -> Message | None:
        return await self._ordered(LoadAdapter(self._rank, request, call.update_id), call)

    async def unload_adapter(self, request: verbs_pb2.UnloadAdapterRequest, call: Call) -> Message | None:
        return await self._ordered(Unload(self._rank, request), call)

    async def _bounded(self, action: Action, call: Call) -> Message | None:
        """Carry out an action that receives tensors, with an interrupt when the time is up."""
        self._check_ready()
        loop = asyncio.get_running_loop()
        timer = loop.call_at(call.deadline - INTERRUPT_S, self._rank.interrupt, call.update_id, "the time was up")
        try:
            return await self._ordered(action, call)
        finally:
            timer.cancel()

    def _ends(self, call: Call) -> float:
        """Return the time at which work for a call must end to be answered, on :func:`time.monotonic`'s clock."""
        return time.monotonic() + call.deadline - asyncio.get_running_loop().time() - INTERRUPT_S

    async def _ordered(self, action: Action, call: Call) -> Message | None:
        self._check_ready()
        return await self._commands.carry_out(action, call)

    # Verbs that each rank carries out by itself.

    async def get_model_info(self, request: verbs_pb2.GetModelInfoRequest, call: Call) -> verbs_pb2.ModelInfo:
        self._check_ready()
        return info.model_info(self._rank, self._version, reference=request.reference, adapter=request.adapter)

    async def get_server_info(self, request: verbs_pb2.GetServerInfoRequest, call: Call) -> verbs_pb2.ServerInfo:
        self._check_ready()
        return info.server_info(self._rank, self.name, self._since)

    async def get_loads(self, request: verbs_pb2.GetLoadsRequest, call: Call) -> verbs_pb2.Loads:
        """Return the load of rank 0; a follower reports the step only."""
        self._check_ready()
        if self._rank.scheduler is None:
            return verbs_pb2.Loads(step=self._loop.step)
        return self._rank.scheduler.loads(self._loop.step)

    async def list_adapters(self, request: verbs_pb2.ListAdaptersRequest, call: Call) -> verbs_pb2.AdapterList:
        self._check_ready()
        return adapters.listed(self._rank)

    async def inspect_checkpoint(
        self, request: verbs_pb2.InspectCheckpointRequest, call: Call
    ) -> verbs_pb2.CheckpointReport:
        self._check_ready()
        return await asyncio.to_thread(self._disk.inspect, request)

    async def pull_weights(self, request: verbs_pb2.PullWeightsRequest, call: Call) -> verbs_pb2.PullReport:
        """Fetch a published version while generation continues."""
        self._check_ready()
        return await asyncio.to_thread(self._disk.pull, request, self._ends(call))

    async def abort_requests(self, request: verbs_pb2.AbortRequestsRequest, call: Call) -> verbs_pb2.AbortReport:
        """End requests early. A follower has no requests."""
        self._check_ready()
        aborted, unknown = self._abort(list(request.rids), all_of_them=request.abort_all)
        return verbs_pb2.AbortReport(aborted=aborted, unknown_rids=unknown)

    async def init_weights_update_group(
        self, request: verbs_pb2.InitWeightsUpdateGroupRequest, call: Call
    ) -> verbs_pb2.GroupReport:
        """Join a weight group on a helper thread, as group rank ``rank_offset`` + own rank, or as part of a pair."""
        self._check_ready()
        place = Membership.of(request, self._config.rank, self._rank.device)
        if place is None:
            return verbs_pb2.GroupReport(group_name=request.group_name, world_size=request.world_size)
        limit = seconds(request.group_timeout)
        join = self._groups.probe
        if not request.probe_only:
            join = partial(self._groups.join, broadcast_timeout_s=limit or LONGEST_S)
        remaining = call.deadline - asyncio.get_running_loop().time() - INTERRUPT_S
        until = time.monotonic() + min(remaining, limit or remaining)

        def in_time() -> verbs_pb2.GroupReport:  # measured here, as the wait for a thread takes time
            timeout_s = max(until - time.monotonic(), 0.01)
            return join(request.group_name, place, timeout_s=timeout_s, update_id=call.update_id)

        return await asyncio.to_thread(in_time)

    async def destroy_weights_update_group(
        self, request: verbs_pb2.DestroyWeightsUpdateGroupRequest, call: Call
    ) -> None:
        """Leave a weight group and end a receive in the group."""
        self._check_ready()
        self._groups.leave(request.group_name)

    async def send_weights(self, request: verbs_pb2.SendWeightsRequest, call: Call) -> Message | None:
        return await self._ordered(Send(self._rank, request), call)

    # Generation.

    async def generate(  # type: ignore[override]
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        scheduler = self._leader()
        check_pair(request, self._mode)
        if self._mode != "null":
            responses = (
                decode(request, self._intake, scheduler)
                if self._rooms is None
                else prefill(request, self._intake, self._rooms, scheduler)
            )
            async with aclosing(responses) as messages:
                async for message in messages:
                    yield message
            return
        stream = self._intake.submit(request, scheduler)
        try:
            async with aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            scheduler.drop(stream)

    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        self._leader()
        if request.abort_all and request.rids:
            raise Reason.FIELD_CONFLICT.error("rids and abort_all exclude each other", field="rids")
        aborted, unknown = self._abort(list(request.rids), all_of_them=request.abort_all)
        return rollout_pb2.AbortResponse(aborted=aborted, unknown_rids=unknown)

    def _abort(self, rids: list[str], *, all_of_them: bool) -> tuple[int, list[str]]:
        if self._rank.scheduler is None:
            return 0, []
        return (self._rank.scheduler.abort_all(), []) if all_of_them else self._rank.scheduler.abort(rids)

    def _leader(self) -> Scheduler:
        self._check_ready()
        if self._rank.scheduler is None:
            raise Reason.NOT_RANK_ZERO.error("requests go to rank 0")
        return self._rank.scheduler

    def _check_ready(self) -> None:
        if self._failure is not None:
            raise rejected(self._failure)
        if not self._ready:
            raise Reason.ILLEGAL_STATE.error(
                "the engine has not started yet", next_step="Repeat the call after the engine has started."
            )
