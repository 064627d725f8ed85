"""The port that rlctl drives: verbs in, calls to SGLang out. One object speaks for all of the server's ranks."""

# ruff: noqa: ARG002 (the port says which arguments a method has)
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.engine import ServerEngine, takes_turn
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates import reload_trial
from rlctl_servers.updates.version_labels import Stamps

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_pair_version
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import OUTCOME_SKIPPED, OUTCOME_UNKNOWN, PAUSE_MODE_ABORT, PAUSE_MODE_UNSPECIFIED
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.rollout_pb2 import GenerateRequest
from rlctl.weights.tensor.tensors import to_proto
from rlctl_sglang.options import parse_options, refuse_workers
from rlctl_sglang.readback.check_weights import Checker
from rlctl_sglang.readback.readback import Readback, readback_of
from rlctl_sglang.readback.send_weights import Source
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
from rlctl_sglang.updates.groups import Groups
from rlctl_sglang.updates.updates import Updates

log = logging.getLogger(__name__)

START_CALL_S = 60.0
PAUSE_S = 1.0
"""How long a pause may take once nothing is in its way."""

INTERRUPT_S = 10.0
"""How long a broadcast of an aborted update may take to end: its source has left the group by then."""


class SGLangEngine(ServerEngine):
    """One SGLang server, with all of its ranks. Options: :class:`rlctl_sglang.options.Options`."""

    name: ClassVar[str] = "sglang"
    _server: Server
    _facts: facts_.Facts
    _updates: Updates
    _limits: Limits

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Check the settings. Raises FIELD_INVALID or FIELD_CONFLICT naming the one that is wrong."""
        self._options = parse_options(config.options)
        super().__init__(config, on_failure, PRODUCT, self._options.allowed_roots)
        self._first: FirstNode | None = FirstNode(self._config) if self._several_nodes() else None
        self._make_server()
        self._pausing = False
        self._source: Source | None = None

    # The life of the engine.

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Launch the server, or attach to it, and find out what it is and can do.

        Raises ENGINE_FAILED for a server that was attached to and does not pass the trial of its loads: its weights are
        of no version then.
        """
        readback, digest, checkpoint, updated = await self._launch()
        refuted = None if digest or updated else await self._tried(checkpoint)
        if refuted is not None and refuted.loaded:
            if not self._server.launched:
                raise reload_trial.spoilt(refuted, PRODUCT, self._server.http.url)
            log.warning("SGLang is started again and takes no updates: %s", refuted.why)
            await self._server.stop()
            self._make_server()
            readback, digest, checkpoint, updated = await self._launch()
            self._facts = self._facts.unwritable(refuted.why)
        facts, limits = self._facts, self._limits
        self._readback = readback
        if readback is not None:
            self._source = Source(self._config.node, readback, self._checkpoints.reference)
        self._groups = Groups(self._control, self._state, ranks=facts.ranks)
        table = LoraTable()
        native = Native(
            self._server.http,
            limits,
            self._stamps,
            table,
            incremental=facts.incremental,
            stopped=lambda: self._state.stopped,
            admit=self._admit,
        )
        self._requests = self._ending = Requests(native)
        self._adapters = Adapters(self._control, self._state, self._checkpoints, self._requests, table, facts.info)
        # Others' requests would be answered while a probe makes the server go on; one of a pair answers none alone.
        probes = self._server.launched and facts.mode == "null"
        prober = Prober(self._control, self._state, self._requests, limits, self.turn) if probes else None
        layout = facts.layout(self._config, self._source.store if self._source is not None else ("", 0))
        self._workers = layout.workers
        reference = self._checkpoints.reference
        self._checker = Checker(self._control, readback, prober, layout.workers, self._updates.marking, reference)
        self._ready = True
        return EngineInfo(
            layout=layout,
            capabilities=facts.capabilities(readable=bool(digest), actions=self._checker.actions),
            checkpoint="" if updated and not digest else checkpoint,  # it may hold what a trainer has sent
            model_digest=digest,
            fenced=self._server.fenced and not facts.info.get("grpc_port"),  # which asks for no key
            bootstrap=facts.bootstrap(self._server.http.url),
        )

    async def _launch(self) -> tuple[Readback | None, str, str, bool]:
        """Have the server run, and find out how weights get into it and are read back.

        Returns how it is read, the digest of what it holds, its checkpoint, and whether it may hold something else.
        """
        await self._server.start()
        call = Call("start", asyncio.get_running_loop().time() + START_CALL_S)
        self._facts = facts = await facts_.ask(
            self._control, self.verbs(), call, launched=self._server.launched, nodes=self._config.nodes
        )
        refuse_workers(facts.info)  # also of a server that somebody else has started
        self._state.paired = facts.mode != "null"
        loaded = await self._control.ask("/model_info", call=call, admin=False)
        self._stamps = Stamps(str(loaded.get("weight_version", "")))
        checkpoint, updated = self._config.model_path, facts.invents
        if not self._server.launched:
            reload_trial.refuse_tried(self._stamps.label, PRODUCT, self._server.http.url)
            updated |= Stamps.ours(self._stamps.label)
            checkpoint = self._checkpoints.attached(str(loaded.get("model_path", "")), updated=updated)
        readback, digest, other = await readback_of(
            self._control,
            checkpoint,
            self._checkpoints.reference,
            ranks=facts.ranks,
            exports=facts.exports,
            call=self._start_call(),
        )
        if other and not self._server.launched:
            updated |= self._checkpoints.dtype == facts.info.get("dtype")  # otherwise it may have been rounded
        label = None if self._server.launched else lambda: self._stamps.label
        self._updates = Updates(self._control, self._state, self._checkpoints, facts, label)
        self._updates.checkpoint = checkpoint
        self._limits = facts.limits(self._checkpoints.config)
        return readback, digest, checkpoint, updated

    async def _tried(self, checkpoint: str) -> reload_trial.Refuted | None:
        """Why loads are not proven to repeat, where nothing reads back what they have come to.

        A server that may hold something else than its checkpoint has nothing to compare with: made-up weights, or those
        of an earlier stage server, which has passed the trial.
        """
        if self._facts.ranks > 1 or self._state.paired:
            return None  # of several ranks every update needs a probe; one of a pair computes nothing alone
        if "UpdateWeightsFromDisk" in self._facts.unsupported:
            return None
        call = self._start_call()

        async def load() -> None:
            await memory.hold(self._control, self._state, call)  # SGLang would wait for others' requests to end
            try:
                await self._updates.load_again(checkpoint, call)
            finally:
                await memory.let_go(self._control, self._state, call)

        refuted = await reload_trial.trial(self._limits, partial(compute, self._control, call), load)
        if refuted is None:
            await self._updates.name(self._stamps.label, call)
        return refuted

    def _start_call(self) -> Call:
        """A call that may take as long as a start."""
        return Call("start", asyncio.get_running_loop().time() + self._options.start_s, "start")

    def _make_server(self) -> None:
        meeting = self._first.meeting if self._first is not None else None
        self._server = Server(self._config, self._options, self._failed, meeting)
        self._control = Control(self._server.http, self._wedged)
        self._state = State()

    def setup(self) -> dict[str, str]:
        """Where the other nodes of the server meet it."""
        return self._first.setup() if self._first is not None else {}

    def can_restart(self) -> bool:
        """A server that was launched can be launched again; one of several nodes by whoever has started all of them."""
        return super().can_restart() and self._first is None

    def lost(self, error: RlctlError) -> None:
        """Nothing comes back from a server of which a node is gone: what waits for it ends with it."""
        self._wedged(error)

    async def stop(self) -> None:
        """End the server if it was launched, and whatever waits for it."""
        if self._first is not None:
            self._first.close()
        if self._source is not None:
            self._source.close()
        if self._ready:
            self._groups.close()
            self._updates.close()
            self._adapters.close()
        await super().stop()

    async def interrupt(self, update_id: str) -> None:
        """A broadcast cannot be broken from outside: when its source's leaving does not end it, the server is stuck."""
        if self._ready and update_id and not await self._updates.interrupted(update_id, INTERRUPT_S):
            self._control.wedged("a broadcast whose update was aborted")

    # Generation and what stops it.

    @takes_turn
    async def pause_generation(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        """Stop generating."""
        self._check("PauseGeneration")
        if request.adapter:
            self._check("LoadAdapter")
            call.accept()
            await self._adapters.pause(request, call, stopped=self._state.stopped)
            return
        mode = self._state.pause(request.mode, active=self._requests.active if self._server.launched else 1)
        call.accept()
        self._pausing = True
        try:
            if mode != MODES[PAUSE_MODE_ABORT] and not self._state.stopped:
                await self._end_prepared(call)
            before, self._state.paused = self._state.paused, _mode_of(mode)
            try:
                await self._control.must("/pause_generation", {"mode": mode}, call=call)
            except RlctlError as error:
                if error.outcome != OUTCOME_UNKNOWN:
                    self._state.paused = before
                raise
            finally:
                await self._leave_unbegun()
        finally:
            self._pausing = False

    @takes_turn
    async def continue_generation(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        """Go on generating."""
        self._check("ContinueGeneration")
        if request.adapter:
            self._check("LoadAdapter")
            call.accept()
            self._adapters.go_on(request.adapter)
            return
        self._state.refuse_continue()
        call.accept()
        empty = request.torch_empty_cache if request.HasField("torch_empty_cache") else True
        await self._control.must("/continue_generation", {"torch_empty_cache": empty}, call=call)
        self._state.paused, self._state.holding = PAUSE_MODE_UNSPECIFIED, False
        self._requests.release()
        self._adapters.sweep_soon()

    @takes_turn
    async def flush_cache(self, request: verbs_pb2.FlushCacheRequest, call: Call) -> verbs_pb2.FlushReport:
        """Empty the caches; refused while requests hold entries, after waiting as long as the request says, and in a
        pair that is paused for handovers.
        """
        self._check("FlushCache")
        call.accept()
        ending = memory.HANDOVER_S if self._state.paired and self._state.stopped else 0.0
        await memory.flush(self._control, max(seconds(request.idle_timeout), ending), call)
        self._stamps.flushed()
        return verbs_pb2.FlushReport(tiers=self._facts.cache_tiers)

    @takes_turn
    async def release_memory(self, request: verbs_pb2.ReleaseMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        """Give regions back."""
        self._check("ReleaseMemory")
        self._refuse_during_update()
        call.accept()
        active = await self._active(call)
        try:
            report = await memory.release(
                self._control,
                self._state,
                request.tags,
                self._facts.memory_tags,
                call,
                active=active,
                keeps_weights=self._facts.keeps_weights,
            )
        finally:
            await self._leave_unbegun()
        if common_pb2.MEMORY_TAG_KV_CACHE in report.released:
            self._stamps.flushed()
        return report

    @takes_turn
    async def resume_memory(self, request: verbs_pb2.ResumeMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        """Take regions again."""
        self._check("ResumeMemory")
        call.accept()
        return await memory.resume(
            self._control,
            self._state,
            request.tags,
            self._facts.memory_tags,
            call,
            keeps_weights=self._facts.keeps_weights,
        )

    # Weights.

    @takes_turn
    async def prepare_update(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Open an update. Refused while requests run, unless they are paused or are to be ended."""
        self._check("PrepareUpdate")
        call.accept()
        if common_pb2.MEMORY_TAG_WEIGHTS in self._state.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released; there is nothing to write into")
        if request.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
            return await self._prepare_adapter(request, call)
        self._refuse_beside_adapter()
        self._updates.refuse(request, call)
        if not self._state.stopped:
            await self._settle(call, abort=request.abort_all_requests)
        return self._updates.prepare(request, call)

    async def init_weights_update_group(
        self, request: verbs_pb2.InitWeightsUpdateGroupRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.GroupReport:
        """Join the ranks into a group."""
        self._check("InitWeightsUpdateGroup")
        if request.rank_offset == 0 and self._source is not None:
            return await self._source.join(request, call)
        return await self._groups.join(request, call)

    async def destroy_weights_update_group(
        self, request: verbs_pb2.DestroyWeightsUpdateGroupRequest, call: Call
    ) -> None:
        """Leave a group. A broadcast in it ends first: its source has left by then, or is about to."""
        self._check("DestroyWeightsUpdateGroup")
        if self._source is not None and self._source.is_in(request.group_name):
            self._source.leave(request.group_name)
            return
        remaining = call.deadline - asyncio.get_running_loop().time()
        if not await self._updates.received(remaining):
            raise Reason.RANK_SILENT.error("a broadcast keeps the ranks in the group", outcome=OUTCOME_UNKNOWN)
        await self._updates.leave(request.group_name, call)

    @takes_turn
    async def update_weights_from_distributed(
        self, request: verbs_pb2.UpdateWeightsFromDistributedRequest, call: Call
    ) -> verbs_pb2.WeightsReport:
        """Take buckets in over groups."""
        self._check("UpdateWeightsFromDistributed")
        self._state.refuse_writing(self._requests.active)
        call.accept()
        return await self._updates.from_distributed(request, call)

    @takes_turn
    async def update_weights_from_tensor(
        self, request: verbs_pb2.UpdateWeightsFromTensorRequest, call: Call
    ) -> verbs_pb2.WeightsReport:
        """Take segments in that lie in memory here."""
        self._check("UpdateWeightsFromTensor")
        if self._adapters.open:
            call.accept()
            return await self._adapters.take(request, call)
        self._state.refuse_writing(self._requests.active)
        call.accept()
        return await self._updates.from_tensor(request, call)

    async def send_weights(self, request: verbs_pb2.SendWeightsRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Send what the server holds to another stage."""
        self._check("SendWeights")
        self._refuse_during_update()
        if common_pb2.MEMORY_TAG_WEIGHTS in self._state.released:
            raise Reason.MEMORY_RELEASED.error("the weights are released; there is nothing to send")
        if self._source is None:
            raise Reason.UNSUPPORTED.error("what this server holds cannot be read", outcome=OUTCOME_SKIPPED)
        call.accept()
        return await self._source.send(request, call)

    @takes_turn
    async def update_weights_from_disk(
        self, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call
    ) -> verbs_pb2.WeightsReport:
        """Load a checkpoint."""
        self._check("UpdateWeightsFromDisk")
        self._state.refuse_writing(self._requests.active)
        call.accept()
        return await self._updates.from_disk(request, call)

    @takes_turn
    async def commit_update(self, request: verbs_pb2.CommitUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Close the update; SGLang's weight version comes last."""
        self._check("CommitUpdate")
        if self._state.session:
            self._state.refuse_writing(self._requests.active)
        call.accept()
        if self._adapters.open:
            return await self._adapters.commit(call)
        label = self._stamps.of(request.version)
        self._stamps.bind(request.version, label)
        before, self._stamps.label = self._stamps.label, label  # while the update is open, see _admit
        try:
            report = await self._updates.commit(label, call)
        except BaseException:
            self._stamps.label = before
            raise
        if request.adapters == verbs_pb2.ADAPTER_POLICY_DROP:
            await self._adapters.drop_all()
        return report

    async def abort_update(self, request: verbs_pb2.AbortUpdateRequest, call: Call) -> None:
        """Drop the update."""
        self._check("AbortUpdate")
        call.accept()
        if self._adapters.open:
            await self._adapters.abort(call)
            return
        # SGLang ends a session between requests only, and waits for those that run.
        held = self._state.session and not self._state.stopped
        if held:
            await memory.hold(self._control, self._state, call)
        try:
            await self._updates.abort(call)
        finally:
            if held:
                await memory.let_go(self._control, self._state, call)

    async def check_weights(
        self, request: verbs_pb2.CheckWeightsRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.CheckReport:
        """Digest what every rank holds, read rows of a tensor, or compute a probe."""
        self._check("CheckWeights")
        call.accept()
        if request.adapter:
            return self._adapters.check(request, self._workers)
        if request.action == verbs_pb2.CHECK_ACTION_RESET_TENSORS:
            return await self._scramble(request, call)
        return await self._checker.check(request, call)

    @takes_turn
    async def _scramble(
        self, request: verbs_pb2.CheckWeightsRequest, call: Call
    ) -> list[RankResult] | verbs_pb2.CheckReport:
        self._refuse_during_update()
        self._state.refuse_writing(self._requests.active)
        return await self._checker.check(request, call)

    # Reads.

    async def get_model_info(self, request: verbs_pb2.GetModelInfoRequest, call: Call) -> verbs_pb2.ModelInfo:
        """What is loaded."""
        self._check("GetModelInfo")
        told = await self._control.ask("/model_info", call=call, admin=False)
        limits = self._facts.limits(self._checkpoints.config)
        reference = self._checkpoints.reference
        label = str(told.get("weight_version", ""))
        return verbs_pb2.ModelInfo(
            model_path=self._updates.checkpoint,
            model_type=told.get("model_type") or "",
            architectures=told.get("architectures") or (),
            weight_version=self._stamps.version(label) or common_pb2.WeightVersion(label=label),
            dtype=f"torch.{self._facts.info.get('dtype')}",
            vocab_size=limits.vocab_size,
            context_length=limits.context_length,
            local_parameters=sum(meta.numel for meta in reference.values()) if self._facts.ranks == 1 else 0,
            tokenizer_path=told.get("tokenizer_path") or "",
            reference=[to_proto(reference[name]) for name in self._order()] if request.reference else (),
        )

    async def _leave_unbegun(self) -> None:
        """What a server of a pair holds back when it stops would be computed with whatever is there when it goes on."""
        if self._state.paired and self._state.stopped:
            await self._requests.cut()

    async def _end_prepared(self, call: Call) -> None:
        """Raises ACTIVE_REQUESTS: nothing was paused."""
        if not await self._requests.end_prepared(call.deadline - PAUSE_S):
            raise Reason.ACTIVE_REQUESTS.error("SGLang does not end requests whose grammar it is compiling")

    def _admit(self, request: GenerateRequest) -> None:
        """Refuse half of a pair's request where it may not be computed at the version that it names.

        The servers do not compare the versions of the two halves. But all that a half is computed with is what it was
        admitted at: no version changes before a pause or an update, and those end or refuse what was admitted before.
        """
        if not self._state.paired:
            if self._pausing and has_grammar(request):
                raise Reason.STAGE_NOT_SERVING.error("SGLang is about to be paused")
            return
        if self._state.stopped or self._updates.open:
            raise Reason.STAGE_NOT_SERVING.error("SGLang is paused, or takes in weights")
        check_pair_version(request, self._stamps.present.sequence)

    def _several_nodes(self) -> bool:
        """Whether the server is launched on several nodes. Raises FIELD_CONFLICT: it runs already."""
        if self._config.nodes > 1 and self._options.url:
            raise Reason.FIELD_CONFLICT.error("a server that is attached to has its own nodes", field="followers")
        return self._config.nodes > 1

    def _order(self) -> Sequence[str]:
        """Names of the tensors, in the order in which they can be sent with the least memory."""
        return list(self._checkpoints.reference) if self._readback is None else self._readback.order

    async def _loads(self, call: Call) -> verbs_pb2.Loads:
        return facts_.loads(await self._control.ask("/v1/loads", call=call, admin=False))


def _mode_of(name: str) -> common_pb2.PauseMode.ValueType:
    return next(mode for mode, known in MODES.items() if known == name)
