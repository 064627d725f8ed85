"""The Engine interface: ranks in lock-step, weights as names with contents, requests that produce tokens.

The engine has every rule of a real engine about order and pause. The rules about updates are in
:mod:`tests.simulator.model.rank_weights`. The engine reports the content of each rank to the observer at every token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from rlctl.contract import decode_check
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import differing
from rlctl.engine import Call, Engine, EngineInfo
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as verbs
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_APPLIED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    TRANSPORT_DISK,
    TRANSPORT_SHARED_MEMORY,
    TRANSPORT_TORCH_GLOO,
    WeightVersion,
    WorkerCoordinates,
)
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout
from rlctl.v1.results_pb2 import RankResult
from tests.simulator.context import Simulation
from tests.simulator.engine.receive import Intake
from tests.simulator.model.profiles import LEVELS, MODEST, SimSlot
from tests.simulator.model.rank_weights import NAMES, Holding, digest, digests, probed
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.virtual_time import Node

ADAPTER_MODES = (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN)
"""Pause modes for one adapter of an engine that cannot stop single requests."""

BUSY = 0.05
"""Chance that an engine has no time for a decode check."""

STALE_DECODE = 0.03
"""Chance that decode steps of a rank compute with earlier weights after a commit."""

DECODE_CHECK_S = 0.3
"""Reported duration of a decode check: long updates make the check without a request for it."""

TAGS = frozenset({MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS})


@dataclass
class Machine:
    """The common state of the ranks of an engine incarnation: the step stream."""

    sim: Simulation
    slot: SimSlot
    nodes: list[Node]
    engines: list[SimEngine] = field(default_factory=list)
    step: int = 0
    ordered: set[str] = field(default_factory=set)
    """Commands that have been put into the stream."""

    @property
    def whole(self) -> bool:
        return all(node.alive for node in self.nodes)

    @property
    def spoken_for(self) -> int:
        """Return the number of ranks of each process."""
        return self.slot.ranks // len(self.nodes)


@dataclass
class _Request:
    rid: str
    adapter: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SimEngine(Engine):
    """A rank."""

    name = "simulated"

    def __init__(self, machine: Machine, rank: int, on_failure: Callable[[RlctlError], None]) -> None:
        self.machine = machine
        self.slot = machine.slot
        self.rank = rank
        self.node = machine.nodes[rank]
        self.holding = Holding({}, machine.sim.off)
        self._sim = machine.sim
        self.fail = on_failure
        self._held: dict[str, asyncio.Future[int]] = {}
        self._paused: int | None = None
        self._going = asyncio.Event()
        self._going.set()
        self._idle = asyncio.Event()
        self._requests: dict[str, _Request] = {}
        self._released: frozenset[int] = frozenset()
        self._pause_adapter = 0
        self._released_adapter = asyncio.Event()
        self.paused_adapters: set[str] = set()
        self._kept: dict[str, str] | None = None
        self._entries: set[tuple[str, ...]] = set()
        """Weights with which the entries of the KV cache were computed."""
        self._version = WeightVersion()
        self._stale_decode = False
        self._intake = Intake(machine.sim, machine.slot, self.node, self.holding)

    def setup(self) -> dict[str, str]:
        """Return nothing: the machine is shared."""
        return {}

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        del setup
        await asyncio.sleep(self.node.random.uniform(0.01, 0.3))
        self.machine.engines.append(self)
        self.holding.weights = dict(self._sim.disks[self.slot.checkpoint])
        host = self.slot.host
        workers = [
            WorkerCoordinates(rank=rank, tp=rank, node=host, host_id=host, device="cpu")
            for rank in range(self.slot.ranks)
        ]
        return EngineInfo(
            layout=StageLayout(
                tp_size=self.slot.ranks,
                pp_size=1,
                dp_size=1,
                ep_size=1,
                workers=workers,
                store_host=self.node.name,
                store_port=1,
            ),
            capabilities=self._capabilities(),
            checkpoint=self.slot.checkpoint,
            model_digest=digest(self.holding.weights) if self.slot.digests else "",
        )

    def _capabilities(self) -> Capabilities:
        slot, modest = self.slot, self.slot.modest
        modes = [PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN]
        return Capabilities(
            pause_modes=modes[:2] if modest else modes,
            adapter_pause_modes=ADAPTER_MODES if modest else modes,
            transports=[TRANSPORT_DISK, TRANSPORT_TORCH_GLOO, *([] if modest else [TRANSPORT_SHARED_MEMORY])],
            adapter_transports=[TRANSPORT_DISK] if modest else [],
            verification=LEVELS[slot.kind],
            answers_for_ranks=slot.speaker,
            memory_tags=[] if modest else sorted(TAGS),
            cache_tiers=["kv"],
            check_actions=[verbs.CHECK_ACTION_DECODE] if slot.compares_decode else [],
            decode_check_time=duration(DECODE_CHECK_S),
            keyed_digests=slot.computes_keyed_digests,
            staged_apply=not modest,
            keeps_weights=not modest,
            unsupported=dict.fromkeys(MODEST if modest else (), "this engine has none of it"),
        )

    async def stop(self) -> None:
        self._abort(None)

    # The step stream.

    async def order(self, command_id: str) -> int:
        """Let every rank carry the command out, each after a small delay."""
        machine = self.machine
        machine.ordered.add(command_id)
        machine.step += 1
        step = machine.step
        for engine in machine.engines:
            delay = engine.node.random.expovariate(1 / 0.002)
            if machine.whole:
                engine.node.later(delay, engine._go, command_id, step)
            else:
                engine.node.later(delay, engine._lost)
        return step

    def _go(self, command_id: str, step: int) -> None:
        held = self._held.pop(command_id, None)
        if held is not None and not held.done():
            held.set_result(step)

    def _lost(self) -> None:
        error = Reason.ENGINE_FAILED.error("a rank of the engine is gone", outcome=OUTCOME_UNKNOWN)
        for held in self._held.values():
            if not held.done():
                held.set_exception(error)
        self._held.clear()
        self.fail(error)

    async def withdraw(self, command_id: str) -> None:
        """Drop the command at this rank, unless it is in the stream."""
        held = None if command_id in self.machine.ordered else self._held.pop(command_id, None)
        if held is not None and not held.done():
            held.set_exception(Reason.CANCELLED.error("withdrawn: not every rank accepted it"))

    async def interrupt(self, update_id: str) -> None:
        """End a waiting receive."""
        del update_id
        self._intake.interrupt()

    async def _begin(self, verb: str, call: Call) -> None:
        """Accept the command and wait for its step."""
        fault = self._sim.engine_faults.at(self.node, verb)
        if fault is not None:
            await fault
        held: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._held[call.command_id] = held
        call.accept()
        call.step = await held
        self._sim.observer.applied(self.node, self.rank, verb, call.command_id)

    def set_version(self, version: WeightVersion) -> None:
        self._version = version

    @property
    def _running(self) -> bool:
        return any(engine._requests for engine in self.machine.engines)

    # Reads.

    async def get_model_info(self, request: verbs.GetModelInfoRequest, call: Call) -> verbs.ModelInfo:
        del call
        info = verbs.ModelInfo(model_path=self.slot.checkpoint, weight_version=self._version)
        if request.reference:
            for name in self.holding.adapters[request.adapter][1] if request.adapter else NAMES:
                info.reference.add(name=name, dtype="torch.float32").shape.dims.append(1)
        return info

    async def get_loads(self, request: verbs.GetLoadsRequest, call: Call) -> verbs.Loads:
        del request, call
        return verbs.Loads(running=len(self._requests), step=self.machine.step)

    async def inspect_checkpoint(self, request: verbs.InspectCheckpointRequest, call: Call) -> verbs.CheckpointReport:
        del call
        self._disk(request.model_path)
        return verbs.CheckpointReport(tensors=len(NAMES))

    # Generation.

    async def pause_generation(self, request: verbs.PauseGenerationRequest, call: Call) -> None:
        mode = request.mode or PAUSE_MODE_ABORT
        if request.adapter:
            await self._begin("PauseGeneration", call)
            await self._stop_users(request.adapter, mode)
            self.paused_adapters.add(request.adapter)
            return
        if self._paused == PAUSE_MODE_IN_PLACE and mode == PAUSE_MODE_ABORT and self._requests:
            raise Reason.PAUSE_MODE_CONFLICT.error("requests are frozen in place; continue, or pause with retract")
        await self._begin("PauseGeneration", call)
        if mode == PAUSE_MODE_ABORT:
            self._abort(None)
        while mode == PAUSE_MODE_DRAIN and self._requests and self._paused is None:
            self._idle.clear()
            await self._idle.wait()
        self._paused = mode
        self._going.clear()

    async def continue_generation(self, request: verbs.ContinueGenerationRequest, call: Call) -> None:
        await self._begin("ContinueGeneration", call)
        if request.adapter:
            self.paused_adapters.discard(request.adapter)
            self._let_go_on()
            return
        self._paused = None
        self._going.set()

    async def abort_requests(self, request: verbs.AbortRequestsRequest, call: Call) -> verbs.AbortReport:
        del call
        return verbs.AbortReport(aborted=self._abort(None if request.abort_all else list(request.rids)))

    async def flush_cache(self, request: verbs.FlushCacheRequest, call: Call) -> verbs.FlushReport:
        del request
        await self._begin("FlushCache", call)
        if self._running and self._paused in (None, PAUSE_MODE_IN_PLACE):
            raise Reason.ACTIVE_REQUESTS.error("requests hold KV entries")
        self._entries.clear()
        return verbs.FlushReport(tiers=["kv"])

    def computes(self) -> None:
        """Record KV entries of the present weights."""
        self._entries.add(tuple(self.holding.weights.values()))

    @property
    def stale(self) -> bool:
        """Return True if the cache has entries of different weights."""
        return bool(self._entries - {tuple(self.holding.weights.values())})

    async def release_memory(self, request: verbs.ReleaseMemoryRequest, call: Call) -> verbs.MemoryReport:
        await self._begin("ReleaseMemory", call)
        if self._running and self._paused is None:
            raise Reason.ACTIVE_REQUESTS.error("requests run")
        tags = frozenset(request.tags) or TAGS
        if MEMORY_TAG_WEIGHTS in tags - self._released:
            self._kept = dict(self.holding.weights) if request.keep_weights else None
            self.holding.weights = dict.fromkeys(NAMES, "released")
        self._released |= tags
        return self._memory()

    async def resume_memory(self, request: verbs.ResumeMemoryRequest, call: Call) -> verbs.MemoryReport:
        await self._begin("ResumeMemory", call)
        tags = frozenset(request.tags) or TAGS
        if MEMORY_TAG_KV_CACHE in self._released & tags:
            self._entries.clear()
        self._released -= tags
        if self._kept is not None and MEMORY_TAG_WEIGHTS not in self._released:
            self.holding.weights, self._kept = self._kept, None
        return self._memory()

    def _memory(self) -> verbs.MemoryReport:
        kept = [] if self._kept is None else [MEMORY_TAG_WEIGHTS]
        return verbs.MemoryReport(released=sorted(self._released), kept=kept)  # type: ignore[arg-type]

    # Weights.

    async def prepare_update(self, request: verbs.PrepareUpdateRequest, call: Call) -> verbs.WeightsReport:
        await self._begin("PrepareUpdate", call)
        staged = request.apply == verbs.APPLY_MODE_STAGED
        if request.kind == verbs.UPDATE_KIND_ADAPTER:
            stopped = request.pause or self._is_paused(request.adapter.name)
            if request.abort_all_requests or not stopped:
                self._end_users(request.adapter.name, end=request.abort_all_requests)
        elif not staged:
            self._refuse_active(abort=request.abort_all_requests)
        self.holding.prepare(request, call.update_id)
        self._pause_adapter = request.pause
        self._let_go_on()
        return verbs.WeightsReport()

    def _refuse_active(self, *, abort: bool = False) -> None:
        if self._running and self._paused is None:
            if not abort:
                raise Reason.ACTIVE_REQUESTS.error("requests run")
            self._abort(None)

    async def update_weights_from_disk(
        self, request: verbs.UpdateWeightsFromDiskRequest, call: Call
    ) -> verbs.WeightsReport:
        """Read a checkpoint, tensor by tensor."""
        self.holding.refuse_other(call.update_id)
        tensors = self._disk(request.model_path)
        await self._begin("UpdateWeightsFromDisk", call)
        await self._intake.from_disk(tensors)
        return verbs.WeightsReport(tensors=len(tensors))

    async def init_weights_update_group(
        self, request: verbs.InitWeightsUpdateGroupRequest, call: Call
    ) -> verbs.GroupReport:
        if request.num_ranks and self.rank >= request.num_ranks:
            return verbs.GroupReport(group_name=request.group_name)
        rank = request.rank_offset + self.rank
        if not request.probe_only:
            left = call.deadline - self.node.loop.time() - 0.1
            ranks = min(self.machine.spoken_for, request.num_ranks or self.machine.spoken_for)
            await self._sim.fabric.join(self.node, request.group_name, rank, request.world_size, left, ranks=ranks)
        return verbs.GroupReport(group_name=request.group_name, group_rank=rank, world_size=request.world_size)

    async def destroy_weights_update_group(self, request: verbs.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        del call
        self._sim.fabric.leave(self.node, request.group_name)

    async def update_weights_from_distributed(
        self, request: verbs.UpdateWeightsFromDistributedRequest, call: Call
    ) -> verbs.WeightsReport:
        """Receive buckets, in their order."""
        self.holding.refuse_other(call.update_id)
        self._intake.refuse_unformed(request)
        await self._begin("UpdateWeightsFromDistributed", call)
        await self._intake.from_groups(request, call)
        return verbs.WeightsReport(tensors=sum(len(bucket.names) for bucket in request.buckets))

    async def update_weights_from_tensor(
        self, request: verbs.UpdateWeightsFromTensorRequest, call: Call
    ) -> verbs.WeightsReport:
        """Copy tensors from segments."""
        self.holding.refuse_other(call.update_id)
        readings = self._intake.found(request)
        await self._begin("UpdateWeightsFromTensor", call)
        return verbs.WeightsReport(tensors=await self._intake.from_memory(readings))

    async def send_weights(self, request: verbs.SendWeightsRequest, call: Call) -> None:
        await self._begin("SendWeights", call)
        if self.rank == 0:
            for bucket in request.buckets:
                left = call.deadline - self.node.loop.time() - 0.1
                held = self.holding.adapters[request.adapter][1] if request.adapter else self.holding.weights
                tensors = {name: held[name] for name in bucket.names}
                await self._sim.fabric.send(self.node, request.group_name, tensors, left)

    async def seal_update(self, request: verbs.SealUpdateRequest, call: Call) -> verbs.WeightsReport:
        """Complete the shadow copy, or an adapter with stopped requests."""
        del request
        self.holding.refuse_other(call.update_id)
        await self._begin("SealUpdate", call)
        if self.holding.adapter is not None:
            if not self._is_paused(self.holding.adapter.name):
                await self._stop_users(self.holding.adapter.name, self._pause_adapter)
            self.holding.refuse_other(call.update_id)
        return self.holding.report(self.holding.seal())

    async def commit_update(self, request: verbs.CommitUpdateRequest, call: Call) -> verbs.WeightsReport:
        self.holding.refuse_other(call.update_id)
        await self._begin("CommitUpdate", call)
        if self.holding.shadow is not None and self.holding.adapter is None:
            self._refuse_active()
        of_base = self.holding.adapter is None
        tensors = self.holding.commit(request)
        if of_base:
            self._stale_decode = self._sim.world.chance(f"decode after {call.command_id}").random() < STALE_DECODE
            self._sim.observer.decodes(self.slot.name, self.rank, request.version, stale=self._stale_decode)
        self._let_go_on()
        return self.holding.report(tensors)

    async def abort_update(self, request: verbs.AbortUpdateRequest, call: Call) -> None:
        del request
        await self._begin("AbortUpdate", call)
        self.holding.abort()
        self._let_go_on()

    # Adapters.

    async def load_adapter(self, request: verbs.LoadAdapterRequest, call: Call) -> verbs.AdapterList:
        self.holding.refuse_other(call.update_id)
        tensors = self._disk(request.path)
        await self._begin("LoadAdapter", call)
        for name, content in tensors.items():
            self._intake.write(name, content)
        assert self.holding.adapter is not None
        return verbs.AdapterList(adapters=[self.holding.adapter])

    async def unload_adapter(self, request: verbs.UnloadAdapterRequest, call: Call) -> verbs.AdapterList:
        if request.name not in self.holding.adapters:
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {request.name!r} is loaded", field="name")
        await self._begin("UnloadAdapter", call)
        self._end_users(request.name, end=request.abort_requests)
        self.holding.adapters.pop(request.name, None)
        return self.holding.listed()

    async def list_adapters(self, request: verbs.ListAdaptersRequest, call: Call) -> verbs.AdapterList:
        del request, call
        return self.holding.listed()

    async def _stop_users(self, name: str, mode: int) -> None:
        """End or drain the requests with an adapter, for a seal or a pause."""
        if mode in (0, PAUSE_MODE_ABORT):
            self._end_users(name, end=mode == PAUSE_MODE_ABORT)
        while mode == PAUSE_MODE_DRAIN and self._users(name) and self.machine.engines[0]._paused is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _is_held(self, adapter: str) -> bool:
        """Return True if an adapter generates nothing: a rank has sealed its update, or a pause by name applies."""
        sealed = any(engine.holding.sealed_adapter == adapter for engine in self.machine.engines)
        sealed = sealed and "adapter_seal" not in self._sim.off
        if "adapter_scope" in self._sim.off and self.paused_adapters:
            return True
        return bool(adapter) and (sealed or self._is_paused(adapter))

    def _is_paused(self, adapter: str) -> bool:
        return any(adapter in engine.paused_adapters for engine in self.machine.engines)

    def _let_go_on(self) -> None:
        for engine in self.machine.engines:
            engine._released_adapter.set()

    def _users(self, name: str) -> list[_Request]:
        return [r for engine in self.machine.engines for r in engine._requests.values() if r.adapter == name]

    def _end_users(self, name: str, *, end: bool) -> None:
        users = self._users(name)
        if users and not end:
            raise Reason.ACTIVE_REQUESTS.error(f"{len(users)} requests run with adapter {name!r}")
        for request in users:
            request.ended.set()

    async def check_weights(
        self, request: verbs.CheckWeightsRequest, call: Call
    ) -> verbs.CheckReport | list[RankResult]:
        """Digest the full tensors, each rank a share. Here every rank inside an engine answers for itself."""
        await self._begin("CheckWeights", call)
        report = self._checked(request)
        if self.machine.spoken_for == 1:
            return report
        return [
            RankResult(
                coordinates=WorkerCoordinates(rank=rank, tp=rank, node=self.slot.host, device="cpu"),
                outcome=OUTCOME_APPLIED,
                evidence=EVIDENCE_RANK,
                step=call.step,
                check=report,
            )
            for rank in range(self.machine.spoken_for)
        ]

    def _checked(self, request: verbs.CheckWeightsRequest) -> verbs.CheckReport:
        if request.action == verbs.CHECK_ACTION_RESET_TENSORS:
            self._refuse_active()
            self.holding.weights = dict.fromkeys(NAMES, "scrambled")
            return verbs.CheckReport(action=request.action)
        if request.action == verbs.CHECK_ACTION_PROBE:
            computed = probed(self.holding.weights, request.prompts)
            return verbs.CheckReport(action=request.action, probed=computed if self.rank == 0 else ())
        if request.action == verbs.CHECK_ACTION_DECODE:
            return self._decode_report()
        if not self.slot.digests or request.action == verbs.CHECK_ACTION_READ:
            raise Reason.UNSUPPORTED.error("this engine cannot digest or read its weights", field="action")
        key = request.digest_key if self.slot.computes_keyed_digests else b""
        held = [engine.holding.asked_for(request) for engine in self.machine.engines]
        mine = self.holding.asked_for(request)
        report = verbs.CheckReport(
            action=request.action,
            tensor_count=len(mine),
            rank_digest="" if key else digest(mine),
            model_digest=digest(mine, key),
            inconsistent=[name for name in mine if len({tensors.get(name) for tensors in held}) > 1],
        )
        each = digests(mine, key)
        if request.per_tensor:
            for name in mine:
                report.model_tensors.add(name=name, sha256=each[name])
        if request.fingerprints and (names := differing(each, request.fingerprints)):
            part = verbs.TensorPart(name=names[0], digest=each[names[0]], differs=True)
            report.difference.CopyFrom(
                verbs.TensorDifference(count=len(names), first=names[0], part=part, tensors=len(mine))
            )
        return report

    def _decode_report(self) -> verbs.CheckReport:
        """Compare decode and prefill: all ranks compute together, so a rank reports all. Some engines are busy."""
        if self.node.random.random() < BUSY:
            raise Reason.DEADLINE_EXCEEDED.error("other requests kept the server")
        stale = any(engine._stale_decode for engine in self.machine.engines)
        report = verbs.DecodeReport(sequences=1, tokens=1, difference=float(stale), tolerance=0.5)
        if decode_check.differs(report):
            raise decode_check.mismatch(report)
        return verbs.CheckReport(action=verbs.CHECK_ACTION_DECODE, decode=report)

    def _disk(self, path: str) -> Tensors:
        if path not in self._sim.disks:
            raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} is not there", field="model_path")
        return self._sim.disks[path]

    # Requests.

    async def generate(self, request: rollout.GenerateRequest) -> AsyncGenerator[rollout.GenerateResponse, None]:
        """Yield tokens one by one."""
        if request.adapter and request.adapter not in self.holding.adapters:
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {request.adapter!r} is loaded", field="adapter")
        mine = _Request(request.rid, request.adapter)
        self._requests[request.rid] = mine
        wanted = request.sampling_params.max_new_tokens
        try:
            for count in range(wanted + 1):
                while (self._paused is not None or self._is_held(mine.adapter)) and not mine.ended.is_set():
                    if self._paused is None:
                        self._released_adapter.clear()
                    await _first(self._going if self._paused is not None else self._released_adapter, mine.ended)
                if request.adapter and request.adapter not in self.holding.adapters:
                    mine.ended.set()
                kind = rollout.FINISH_TYPE_UNSPECIFIED
                if mine.ended.is_set():
                    kind = rollout.FINISH_TYPE_ABORT
                elif count == wanted:
                    kind = rollout.FINISH_TYPE_LENGTH
                part = self._part(mine, count, kind)
                if not kind:
                    held = [engine.holding for engine in self.machine.engines]
                    stale = any(engine.stale for engine in self.machine.engines)
                    for engine in self.machine.engines:
                        engine.computes()
                    self._sim.observer.made(part, request.adapter, held, self._released, stale=stale)
                yield part
                if kind:
                    return
                await asyncio.sleep(self.node.random.uniform(0.02, 0.2))
        finally:
            self._requests.pop(request.rid, None)
            if not self._requests:
                self._idle.set()

    def _part(self, request: _Request, count: int, kind: rollout.FinishType.ValueType) -> rollout.GenerateResponse:
        sample = rollout.Sample(index=0, completion_tokens=count + (not kind))
        if kind:
            sample.finish_reason.type = kind
        else:
            adapter = self.holding.adapters[request.adapter][0].version if request.adapter else ""
            sample.output_ids.append(count)
            sample.versions.add(version=self._version, start=count, end=count + 1, adapter_version=adapter)
        return rollout.GenerateResponse(rid=request.rid, prompt_tokens=1, samples=[sample])

    async def abort(self, request: rollout.AbortRequest) -> rollout.AbortResponse:
        return rollout.AbortResponse(aborted=self._abort(None if request.abort_all else list(request.rids)))

    def _abort(self, rids: list[str] | None) -> int:
        chosen = [r for r in self._requests.values() if rids is None or r.rid in rids]
        for request in chosen:
            request.ended.set()
        return len(chosen)


async def _first(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
