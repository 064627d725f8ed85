"""SGLang as an engine: verbs in, calls to SGLang out. One object answers for all of the server's ranks."""

# ruff: noqa: ARG002 (the port says which arguments a method has)
from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import ClassVar

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.engine import ServerEngine, takes_turn
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.server_info import WRITES
from rlctl_servers.updates import reload_trial
from rlctl_servers.updates.checkpoints import digest_at
from rlctl_servers.updates.rank_calls import Met
from rlctl_servers.updates.updates import Updates
from rlctl_servers.updates.version_labels import Stamps

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_pair_version
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    OUTCOME_DIRTY,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_ABORT,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.rollout_pb2 import GenerateRequest
from rlctl.weights.group.network_interfaces import address_of
from rlctl.weights.tensor.placement import host_id
from rlctl.weights.tensor.tensors import to_proto
from rlctl_sglang.options import parse_options, refuse_workers
from rlctl_sglang.ranks.channel import ABSENT
from rlctl_sglang.requests import passing
from rlctl_sglang.requests.bodies import Limits, has_grammar
from rlctl_sglang.requests.probe import Prober, compute
from rlctl_sglang.requests.requests import Native
from rlctl_sglang.server import facts as facts_
from rlctl_sglang.server import memory
from rlctl_sglang.server.nodes import FirstNode
from rlctl_sglang.server.process import PRODUCT
from rlctl_sglang.server.server import Server
from rlctl_sglang.state import MODES, State
from rlctl_sglang.updates.adapters import Adapters
from rlctl_sglang.updates.rank_calls import Ranks

log = logging.getLogger(__name__)

START_CALL_S = 60.0
PAUSE_S = 1.0
"""Seconds that a pause may take if nothing is in its way."""


class SGLangEngine(ServerEngine):
    """One SGLang server with all of its ranks. Options: :class:`rlctl_sglang.options.Options`."""

    name: ClassVar[str] = "sglang"
    _server: Server
    _facts: facts_.Facts
    _state: State
    _ranks: Ranks | None
    _limits: Limits

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Check the settings. Raises FIELD_INVALID or FIELD_CONFLICT with the name of the setting."""
        self._options = parse_options(config.options)
        super().__init__(config, on_failure, PRODUCT, self._options.allowed_roots)
        self._first: FirstNode | None = FirstNode(self._config) if self._several_nodes() else None
        self._make_server()
        self._pausing = False

    # The life of the engine.

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Launch the server, or attach to it, and ask for facts and capabilities.

        Raises ENGINE_FAILED for an attached server that does not pass the trial of loads. The weights then have no
        version.
        """
        await self._launch()
        refuted = await self._tried()
        if refuted is not None and refuted.loaded:
            if not self._server.launched:
                raise reload_trial.spoilt(refuted, PRODUCT, self._server.http.url)
            log.warning("SGLang is started again and takes no updates: %s", refuted.why)
            await self._server.stop()
            self._make_server()
            await self._launch()
            self._facts = self._facts.unwritable(refuted.why)
        facts, limits = self._facts, self._limits
        table = LoraTable()
        native = Native(
            self._server.http,
            limits,
            self._stamps,
            table,
            incremental=facts.incremental,
            stopped=lambda: self._state.stopped,
            admit=self._admit,
            admit_passed=self._admit_passed,
        )
        self._requests = self._ending = Requests(native)
        reader = passing.Reader(limits, str(facts.info.get("served_model_name") or ""))
        self._passing = Passing(self._server.http, reader, self._requests, self._stamps, table)
        is_unpaired = facts.mode == "null"  # a server of a pair generates nothing alone
        routes = passing.routes(metrics=bool(facts.info.get("enable_metrics")))
        http_routes = [*routes, *self._options.data_routes] if is_unpaired else []
        self._adapters = Adapters(
            self._control,
            self._state,
            self._checkpoints,
            self._requests,
            table,
            facts.info,
            self._ranks,
            elsewhere=any(rank["host_id"] != host_id() for rank in facts.ranks),
        )
        await self._take_over(self._start_call())
        # A probe would let an attached server answer other requests. A server of a pair answers no probe alone. A probe
        # does not come to all data-parallel ranks.
        probes = self._server.launched and facts.mode == "null" and facts.dp_ranks == 1
        self._prober = Prober(self._control, self._state, self._requests, limits, self.turn) if probes else None
        # Other weights than the checkpoint's are readable if the weights of a checkpoint once were.
        readable = bool(self._proof or (self._met.digest and self._confirmed))
        self._layout = facts.layout(self._config, readable=readable).workers
        # An updated server may have weights from a trainer.
        checkpoint = "" if self._updated and not self._proof else self._checkpoint
        capabilities = facts.capabilities(
            readable=readable,
            staged=self._staged(),
            probes=self._prober is not None,
            unproven=self._unproven(refuted),
        )
        await self._calibrate(capabilities, self._start_call())
        await self._freeze_heap(self._start_call())
        self._ready = True
        return EngineInfo(
            layout=facts.layout(self._config, readable=readable),
            capabilities=capabilities,
            checkpoint=checkpoint,
            model_digest=self._proof,
            fenced=self._server.fenced and not facts.info.get("grpc_port"),  # gRPC asks for no key
            bootstrap=facts.bootstrap(self._server.http.url),
            http_routes=http_routes,
        )

    async def _launch(self) -> None:
        await self._server.start()
        call = Call("start", asyncio.get_running_loop().time() + START_CALL_S)
        ranks, reference = Ranks(self._control), self._checkpoints.reference
        attach = partial(ranks.attach, reference, address_of(self._config.node), call)
        self._facts = facts = await facts_.ask(self._control, self.verbs(), attach, call)
        refuse_workers(facts.info)  # also for an attached server
        if self._server.launched and not facts.ranks and ABSENT in facts.unsupported.values():
            raise Reason.ENGINE_FAILED.error(ABSENT, next_step="SGLang's log says why it has not loaded the plug-in.")
        self._ranks = ranks if facts.ranks else None
        self._met, self._proof = Met(), ""
        self._state.paired = facts.mode != "null"
        loaded = await self._control.ask("/model_info", call=call, admin=False)
        self._stamps = Stamps(str(loaded.get("weight_version", "")))
        self._checkpoint, self._updated = self._config.model_path, facts.invents
        if not self._server.launched:
            reload_trial.refuse_tried(self._stamps.label, PRODUCT, self._server.http.url)
            self._updated |= Stamps.ours(self._stamps.label)
            self._checkpoint = self._checkpoints.attached(str(loaded.get("model_path", "")), updated=self._updated)
        self._updates = Updates(
            PRODUCT,
            self._control,
            self._checkpoints,
            self._ranks,
            facts.layout(self._config, readable=False).workers,
            memory.own_pause(self._control, self._state),
            server_load=None if self._ranks is not None else self._load_by_server,
            label=None if self._server.launched else lambda: self._stamps.label,
            draft=facts.draft,
            loaders=facts.loaders,
        )
        self._updates.checkpoint = self._checkpoint
        self._limits = facts.limits(self._checkpoints.config)

    async def _tried(self) -> reload_trial.Refuted | None:
        """Try a second load, and compare the values computed before and after. Return why the trial failed, or None.

        The search for places at the ranks is such a load. Without it the checkpoint is loaded again, unless the server
        may have other weights, or belongs to a pair and computes nothing alone.
        """
        call = self._start_call()
        refuted = None
        ranks = self._facts.ranks
        self._on_disk = await asyncio.to_thread(digest_at, self._checkpoint) if ranks else ""
        self._confirmed = bool(ranks) and all(rank["confirmed"] for rank in ranks)
        if self._ranks is not None and all(rank["learned"] for rank in ranks):
            self._met = await self._ranks.meet(ranks, self._checkpoints.reference, call, self._on_disk)
        elif self._ranks is not None and not set(WRITES) & self._facts.unsupported.keys():
            refuted = await self._trial(self._learn, call)
        if self._met.digest and self._met.digest == self._on_disk:
            self._proof = self._met.digest
        self._confirmed |= bool(self._proof)
        if self._proof or (refuted is not None and refuted.loaded) or self._updated or self._state.paired:
            return refuted  # each update is read back, or no comparison is possible
        if self._facts.world_size > 1 and self._ranks is None:
            return None  # with several ranks every update needs a probe
        if "UpdateWeightsFromDisk" in self._facts.unsupported:
            return None
        return await self._trial(partial(self._updates.load_again, self._checkpoint), call)

    async def _freeze_heap(self, call: Call) -> None:
        """Exempt the objects of the start from the garbage collector of a launched server's processes.

        On a CPU, SGLang collects at each flush, under the pause of an update: without this 0.4 s of a core. SGLang
        sends this call to itself too. But if it skips its warm-up, its port may not be open yet, and the call fails.
        """
        if not self._server.launched:
            return
        answer = await self._control.tell("/freeze_gc", {}, call=call)
        if not answer.ok:
            log.warning("SGLang does not freeze its heap, so a flush of its caches may take longer: %s", answer.message)

    def _unproven(self, refuted: reload_trial.Refuted | None) -> str:
        """Return why loads may not repeat, or ""."""
        if refuted is not None:
            return refuted.why
        untested = self._state.paired and not self._confirmed
        return "one of a pair computes nothing alone, so no second load was compared with the first" if untested else ""

    async def _trial(self, load: Callable[[Call], Awaitable[None]], call: Call) -> reload_trial.Refuted | None:
        async def load_paused() -> None:
            own = memory.own_pause(self._control, self._state)
            await own.hold(call)
            try:
                await load(call)
            finally:
                await own.let_go(call)

        if self._state.paired:
            loads = await self._loads(call)
            if not self._server.launched and loads.running + loads.waiting:
                return None  # the pause of a pair's server would end requests of other callers
            await load_paused()
            refuted = None
        else:
            refuted = await reload_trial.trial(self._limits, partial(compute, self._control, call), load_paused)
        if refuted is None:
            await self._updates.name(self._stamps.label, call)
            self._updates.marking.committed()
        return refuted

    async def _learn(self, call: Call) -> None:
        """Let the ranks find the places of the checkpoint's elements."""
        assert self._ranks is not None
        await self._updates.marking.begin_trial(call)
        self._met = await self._ranks.meet(self._facts.ranks, self._checkpoints.reference, call, self._on_disk)

    async def _load_by_server(self, path: str, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call) -> None:
        body = {
            "model_path": path,
            "load_format": "auto",  # SGLang's default is the format of its start
            "flush_cache": False,
            "recapture_cuda_graph": request.options.recapture_cuda_graph,
            "torch_empty_cache": request.options.torch_empty_cache,
            "token_step": request.token_step,
        }
        await self._control.must("/update_weights_from_disk", body, call=call, outcome=OUTCOME_DIRTY)

    def _start_call(self) -> Call:
        return Call("start", asyncio.get_running_loop().time() + self._options.start_s, "start")

    def _make_server(self) -> None:
        meeting = self._first.meeting if self._first is not None else None
        self._server = Server(self._config, self._options, self._failed, meeting)
        self._control = Control(self._server.http, self._wedged)
        self._state = State()

    def setup(self) -> dict[str, str]:
        """Return the meeting point and settings for the other nodes of the server."""
        return self._first.setup() if self._first is not None else {}

    def can_restart(self) -> bool:
        """Return whether the server was launched on a single node. On several nodes the launcher restarts all parts."""
        return super().can_restart() and self._first is None

    def lost(self, error: RlctlError) -> None:
        """End the server and waiting calls: without a node the server answers nothing."""
        self._wedged(error)

    async def stop(self) -> None:
        """End a launched server, and the calls that wait for the server."""
        if self._first is not None:
            self._first.close()
        await super().stop()
        if self._ready:
            self._adapters.close()

    # Generation and what stops it.

    async def _pause(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        mode = self._state.pause(request.mode, active=self._requests.active if self._server.launched else 1)
        call.accept()
        self._pausing = True
        try:
            if mode != MODES[PAUSE_MODE_ABORT] and not self._state.stopped:
                await self._end_prepared(call)
            previous, self._state.paused = self._state.paused, _mode_of(mode)
            try:
                await self._control.must("/pause_generation", {"mode": mode}, call=call)
            except RlctlError as error:
                if error.outcome != OUTCOME_UNKNOWN:
                    self._state.paused = previous
                raise
            finally:
                await self._leave_unbegun()
        finally:
            self._pausing = False

    async def _go_on(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        empty = request.torch_empty_cache if request.HasField("torch_empty_cache") else True
        await self._control.must("/continue_generation", {"torch_empty_cache": empty}, call=call)

    @takes_turn
    async def flush_cache(self, request: verbs_pb2.FlushCacheRequest, call: Call) -> verbs_pb2.FlushReport:
        """Empty the caches. Raises ACTIVE_REQUESTS if requests still hold entries after ``idle_timeout``.

        In a paused pair the wait is long enough for handovers.
        """
        self._check("FlushCache")
        call.accept()
        ending = memory.HANDOVER_S if self._state.paired and self._state.stopped else 0.0
        await memory.flush(self._control, max(seconds(request.idle_timeout), ending), call)
        self._stamps.flushed()
        return verbs_pb2.FlushReport(tiers=self._facts.cache_tiers)

    async def _release(
        self, request: verbs_pb2.ReleaseMemoryRequest, active: int, call: Call
    ) -> verbs_pb2.MemoryReport:
        facts = self._facts
        try:
            return await memory.release(
                self._control,
                self._ranks,
                self._state,
                request.tags,
                facts.memory_tags,
                call,
                active=active,
                keeps_weights=facts.keeps_weights,
            )
        finally:
            await self._leave_unbegun()

    @takes_turn
    async def resume_memory(self, request: verbs_pb2.ResumeMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        self._check("ResumeMemory")
        call.accept()
        return await memory.resume(
            self._control,
            self._ranks,
            self._state,
            request.tags,
            self._facts.memory_tags,
            call,
            keeps_weights=self._facts.keeps_weights,
        )

    # Weights.

    async def prepare_update(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        try:
            return await super().prepare_update(request, call)
        finally:
            await self._leave_unbegun()

    async def _commit(
        self, request: verbs_pb2.CommitUpdateRequest, label: str, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        was_open = self._updates.open
        previous, self._stamps.label = self._stamps.label, label  # while the update is open, see _admit
        try:
            return await self._updates.commit(request, label, call)
        except BaseException:
            if not was_open or self._updates.open:
                self._stamps.label = previous
            raise

    async def check_weights(
        self, request: verbs_pb2.CheckWeightsRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.CheckReport:
        """Do as :meth:`ServerEngine.check_weights`, or scramble the weights."""
        if request.action == verbs_pb2.CHECK_ACTION_RESET_TENSORS and not request.adapter:
            self._check("CheckWeights")
            return await self._scramble(request, call)
        return await super().check_weights(request, call)

    @takes_turn
    async def _scramble(self, request: verbs_pb2.CheckWeightsRequest, call: Call) -> list[RankResult]:
        """Let SGLang scramble its weights, for tests of verification."""
        self._refuse_during_update()
        active = self._requests.active
        if active and not self._state.stopped:
            raise Reason.ACTIVE_REQUESTS.error(f"{active} requests are active", metadata={"count": str(active)})
        call.accept()
        await self._updates.marking.spoil(call)
        # Even after a failure, weights may have been scrambled.
        body = {"action": "reset_tensors", "skip_tensor_list": list(request.skip_tensors) or None}
        await self._control.must("/weights_checker", body, call=call, outcome=OUTCOME_UNKNOWN)
        check_request = verbs_pb2.CheckWeightsRequest(
            action=verbs_pb2.CHECK_ACTION_CHECKSUM, model_digest=False, skip_tensors=request.skip_tensors
        )
        results = await self._check_ranks(check_request, call)
        for result in results:
            result.check.action = request.action
        return results

    # Reads.

    async def get_model_info(self, request: verbs_pb2.GetModelInfoRequest, call: Call) -> verbs_pb2.ModelInfo:
        self._check("GetModelInfo")
        info = await self._control.ask("/model_info", call=call, admin=False)
        limits = self._facts.limits(self._checkpoints.config)
        reference = self._checkpoints.reference
        label = str(info.get("weight_version", ""))
        return verbs_pb2.ModelInfo(
            model_path=self._updates.checkpoint,
            model_type=info.get("model_type") or "",
            architectures=info.get("architectures") or (),
            weight_version=self._stamps.version(label) or common_pb2.WeightVersion(label=label),
            dtype=f"torch.{self._facts.info.get('dtype')}",
            vocab_size=limits.vocab_size,
            context_length=limits.context_length,
            local_parameters=sum(meta.numel for meta in reference.values()) if self._facts.world_size == 1 else 0,
            tokenizer_path=info.get("tokenizer_path") or "",
            reference=[to_proto(meta) for meta in reference.values()] if request.reference else (),
        )

    async def _leave_unbegun(self) -> None:
        """Cut the requests that a stopped server of a pair holds back: it would compute them with later weights."""
        if self._state.paired and self._state.stopped:
            await self._requests.cut()

    async def _end_prepared(self, call: Call) -> None:
        """End prepared requests before a pause. Raises ACTIVE_REQUESTS, and nothing was paused."""
        if not await self._requests.end_prepared(call.deadline - PAUSE_S):
            raise Reason.ACTIVE_REQUESTS.error("SGLang does not end requests while it compiles their grammar")

    def _admit(self, request: GenerateRequest) -> None:
        """Refuse half of a pair's request if it may not be computed at the version that it names.

        The servers do not compare the versions of the two halves. But a half is computed only at the version of its
        admission. No version changes before a pause or an update, and these end or refuse the admitted requests.
        """
        if not self._state.paired:
            if self._pausing and has_grammar(request):
                raise Reason.STAGE_NOT_SERVING.error("SGLang is about to be paused")
            return
        if self._state.stopped or self._updates.in_place:
            raise Reason.STAGE_NOT_SERVING.error("SGLang is paused, or takes in weights")
        check_pair_version(request, self._stamps.present.sequence)

    def _admit_passed(self, prepared: bool) -> None:
        """Raises STAGE_NOT_SERVING; see :meth:`~rlctl_sglang.requests.requests.Native.prepares`."""
        if self._pausing and prepared:
            raise Reason.STAGE_NOT_SERVING.error("SGLang is about to be paused")

    def _several_nodes(self) -> bool:
        """Return whether the server is launched on several nodes. Raises FIELD_CONFLICT for an attached server."""
        if self._config.nodes > 1 and self._options.url:
            raise Reason.FIELD_CONFLICT.error("a server that is attached to has its own nodes", field="followers")
        return self._config.nodes > 1

    async def _loads(self, call: Call) -> verbs_pb2.Loads:
        return facts_.loads(await self._control.ask("/v1/loads", call=call, admin=False))


def _mode_of(name: str) -> common_pb2.PauseMode.ValueType:
    return next(mode for mode, mode_name in MODES.items() if mode_name == name)
