"""The vLLM engine behind rlctl's engine interface: verbs in, calls to vLLM out, for all ranks of a server."""

# ruff: noqa: ARG002 (the port says which arguments a method has)
from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.engine import IDLE_S, Ending, ServerEngine, takes_turn
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import LEAVING_S
from rlctl_servers.server.http import Http
from rlctl_servers.updates import reload_trial
from rlctl_servers.updates.checkpoints import digest_at
from rlctl_servers.updates.rank_calls import Met
from rlctl_servers.updates.updates import Updates
from rlctl_servers.updates.version_labels import WRITING, Stamps

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    OUTCOME_DIRTY,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import RankResult
from rlctl.weights.group.network_interfaces import address_of
from rlctl.weights.tensor.tensors import to_proto
from rlctl_vllm.options import PRODUCT, parse_options
from rlctl_vllm.requests import passing
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.requests.probe import Prober, compute
from rlctl_vllm.requests.requests import TokensInOut
from rlctl_vllm.server import facts as facts_
from rlctl_vllm.server import memory
from rlctl_vllm.server.server import Server
from rlctl_vllm.state import MODES, State
from rlctl_vllm.updates.adapters import Adapters
from rlctl_vllm.updates.in_step import InStepControl
from rlctl_vllm.updates.native_nccl import Native
from rlctl_vllm.updates.worker_calls import Workers

log = logging.getLogger(__name__)

START_CALL_S = 120.0

BUSY_S = 1.0
"""Longest wait for the number of requests when the stage server ends, in seconds."""

STORES = "reset_external=true"
"""Query of a flush that also empties stores of KV entries, where possible."""


class VLLMEngine(ServerEngine):
    """A vLLM server with all its ranks. Options: :class:`rlctl_servers.options.Options`."""

    name: ClassVar[str] = "vllm"
    _server: Server
    _facts: facts_.Facts
    _adapters: Adapters
    _state: State
    _control: InStepControl
    _ranks: Workers | Native | None
    _limits: Limits

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Check the settings. Raises FIELD_INVALID or FIELD_CONFLICT with the name of the wrong setting."""
        self._options = parse_options(config.options)
        super().__init__(config, on_failure, PRODUCT, self._options.allowed_roots)
        self._server = Server(self._config, self._options, self._failed)
        self._control = InStepControl(self._server.http, self._wedged)
        self._state = State()
        self._met, self._on_disk = Met(), ""

    # The life of the engine.

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Launch the server or attach to it, and determine its facts and capabilities.

        Raises ENGINE_FAILED if an attached server fails the trial of loads: its weights are then of no version.
        """
        await self._launch()
        facts = self._facts
        digest = facts.digest if facts.digest == self._on_disk else ""
        refuted = None if digest else await self._tried()
        if refuted is not None and refuted.loaded:
            if not self._server.launched:
                raise reload_trial.spoilt(refuted, PRODUCT, self._server.http.url)
            log.warning("vLLM is started again and takes no updates: %s", refuted.why)
            await self._launch_again()
            self._facts = facts = self._facts.unwritable(refuted.why)
        table = LoraTable()
        self._requests = self._ending = Requests(TokensInOut(self._server.http, self._limits, self._stamps, table))
        served = await self._served_name()
        reader = passing.Reader(self._limits, served, self._checkpoint_paths, table)
        self._passing = Passing(self._server.http, reader, self._requests, self._stamps, table)
        self._adapters = Adapters(
            self._control,
            self._checkpoints,
            self._requests,
            table,
            facts.lora,
            self._server.place,
            lambda: self._state.stopped,
        )
        await self._take_over(self._start_call())
        self._readable = bool(digest)
        # A probe lifts the pause. An attached server would then answer requests of other callers, and some servers end
        # on log probabilities of a prompt beside a paused request.
        self._prober = (
            Prober(self._control, self._state, self._requests, self._limits, self.turn)
            if self._server.launched and not facts.no_prompt_logprobs
            else None
        )
        self._ready = True
        # Weights of a different origin, or from a trainer, are the checkpoint's only if the digest says so.
        matches_checkpoint = digest or (facts.reads and (self._server.launched or not Stamps.ours(facts.label)))
        capabilities = facts.capabilities(
            readable=self._readable,
            staged=self._staged(),
            probes=self._prober is not None,
            unproven=refuted.why if refuted else "",
        )
        await self._calibrate(capabilities, self._start_call())
        return EngineInfo(
            layout=facts.layout(self._config),
            capabilities=capabilities,
            checkpoint=self._config.model_path if matches_checkpoint else "",
            model_digest=digest,
            fenced=self._server.launched,
            http_routes=[*passing.routes(), *self._options.data_routes],
        )

    def _checkpoint_paths(self) -> tuple[str, str]:
        return self._config.model_path, self._updates.checkpoint

    async def _served_name(self) -> str:
        models = await self._control.ask("/v1/models", call=self._start_call(), admin=False)
        return str(models["data"][0]["id"])

    def _start_call(self) -> Call:
        return Call("start", asyncio.get_running_loop().time() + START_CALL_S)

    async def _launch(self) -> None:
        await self._server.start()
        call = self._start_call()
        workers, reference, host = Workers(self._control), self._checkpoints.reference, address_of(self._config.node)

        async def attach() -> list[dict[str, Any]]:
            ranks = await workers.attach(reference, host, call)
            if ranks:
                self._on_disk = await asyncio.to_thread(digest_at, self._config.model_path)
                meeting = Call("start", asyncio.get_running_loop().time() + START_CALL_S)
                self._met = await workers.meet(ranks, reference, meeting, self._on_disk)
            return [{**rank, "digest": self._met.digest} for rank in ranks]

        salted = self._server.launched  # other callers of an attached server send no salt
        self._facts = facts = await facts_.ask(self._control, self.verbs(), attach, call, salted=salted)
        self._control.ranks = facts.world_size // facts.dp_size
        if not self._server.launched:
            reload_trial.refuse_tried(facts.label, PRODUCT, self._server.http.url)
            models = await self._control.ask("/v1/models", call=call, admin=False)
            self._checkpoints.attached(str(models["data"][0].get("root", "")))
        self._layout: Sequence[WorkerCoordinates] = facts.layout(self._config).workers
        self._ranks = workers if facts.ranks else None
        if facts.native:
            interrupted = facts.label == WRITING
            native = Native(self._control, reference, facts.world_size, host, interrupted=interrupted)
            await native.settle(call)
            self._ranks = native
        self._stamps = Stamps(facts.label)
        label = None if self._server.launched else lambda: self._stamps.label
        self._updates = Updates(
            PRODUCT,
            self._control,
            self._checkpoints,
            self._ranks,
            self._layout,
            memory.own_pause(self._control, self._state),
            server_load=None if isinstance(self._ranks, Workers) else self._load_by_server,
            label=label,
        )
        self._limits = facts.limits(self._checkpoints.config)

    async def _load_by_server(self, path: str, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._control.must("/collective_rpc", body, call=call, outcome=OUTCOME_DIRTY)

    async def _launch_again(self) -> None:
        await self._server.stop()
        self._server = Server(self._config, self._options, self._failed)
        self._control = InStepControl(self._server.http, self._wedged)
        self._state = State()
        await self._launch()

    async def _tried(self) -> reload_trial.Refuted | None:
        """Return why loads are not proven to repeat, or None. Runs the trial of loads if necessary."""
        if not self._facts.reads:
            return reload_trial.Refuted(reload_trial.INVENTED, loaded=False)
        if not self._server.launched and Stamps.ours(self._stamps.label):
            return None  # the label is the proof
        if not self._facts.writable:
            return None  # no second load follows
        call = Call("start", asyncio.get_running_loop().time() + self._options.start_s, "start")
        load = partial(self._updates.load_again, self._config.model_path, call)
        refuted = await reload_trial.trial(self._limits, partial(compute, self._control, call), load)
        if refuted is None:
            await self._updates.name(self._stamps.label, call)
        return refuted

    async def stop(self) -> None:
        """End a launched server, and everything that waits for the server."""
        attached, failed = not self._server.launched, self._failure is not None
        gone = attached and failed and await self._server.is_gone()
        busy = self._ready and attached and not gone and (failed or await self._has_requests())
        await super().stop()
        if self._ready:
            self._adapters.close(busy=busy, gone=gone)

    async def _has_requests(self) -> bool:
        """Return True also if vLLM does not say so in time."""
        try:
            loads = await self._loads(Call("stop", asyncio.get_running_loop().time() + BUSY_S))
        except RlctlError:
            return True
        return bool(loads.running or loads.waiting)

    @property
    def http(self) -> Http:
        return self._server.http

    def leave_requests_to(self, ending: Ending) -> None:
        """Use ``ending`` from now on: requests reach the server past this object."""
        self._ending = ending

    async def _received(self, timeout_s: float) -> bool:
        """Stop further receives, and wait until the ranks receive nothing. Return False if ``timeout_s`` ends first.

        The source has left its group by then, or is about to.
        """
        if isinstance(self._ranks, Native):
            self._ranks.stop()
        return await super()._received(timeout_s)

    # Generation and what stops it.

    async def _pause(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        mode = self._state.pause(request.mode)
        if mode == PAUSE_MODE_DRAIN:
            self._state.refuse_drain(active=await self._active(call), whole=self._updates.whole)
        call.accept()
        try:
            if mode == PAUSE_MODE_DRAIN:
                await self._drain(call)
            else:
                await memory.pause(self._control, mode, call, was_stopped=self._state.stopped)
        except RlctlError as error:
            if error.outcome == OUTCOME_UNKNOWN:
                self._state.paused = mode
            raise
        if mode == PAUSE_MODE_RETRACT:
            self._stamps.flushed()
        self._state.paused = mode

    async def _go_on(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        await self._control.must("/resume", {}, call=call)

    @takes_turn
    async def flush_cache(self, request: verbs_pb2.FlushCacheRequest, call: Call) -> verbs_pb2.FlushReport:
        """Empty the caches. Refused while requests hold entries, after a wait for the idle timeout of the request."""
        self._check("FlushCache")
        call.accept()
        now = asyncio.get_running_loop().time
        until = min(now() + max(seconds(request.idle_timeout), IDLE_S), call.deadline)
        while not (await self._control.tell(f"/reset_prefix_cache?{STORES}", {}, call=call)).ok:
            if now() + IDLE_S > until:
                raise Reason.ACTIVE_REQUESTS.error("vLLM keeps its cache: requests hold entries of it")
            await asyncio.sleep(IDLE_S)
        self._stamps.flushed()
        return verbs_pb2.FlushReport(tiers=["prefix"])

    async def _release(
        self, request: verbs_pb2.ReleaseMemoryRequest, active: int, call: Call
    ) -> verbs_pb2.MemoryReport:
        return await memory.release(self._control, self._state, request.tags, self._facts.memory_tags, active, call)

    @takes_turn
    async def resume_memory(self, request: verbs_pb2.ResumeMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        self._check("ResumeMemory")
        call.accept()
        return await memory.resume(self._control, self._state, request.tags, self._facts.memory_tags, call)

    async def _drain(self, call: Call) -> None:
        """Let running requests end while new requests wait. A timeout restores the former state: no pause, or frozen
        requests.
        """
        remaining = call.deadline - asyncio.get_running_loop().time()
        timeout_s = remaining - min(LEAVING_S, remaining / 10)  # the caller gets time to hear the result
        try:
            answer = await self._server.http.call(f"/pause?{MODES[PAUSE_MODE_DRAIN]}", {}, timeout_s=timeout_s)
        except TimeoutError:
            late = dataclasses.replace(call, deadline=asyncio.get_running_loop().time())
            path = f"/pause?{MODES[PAUSE_MODE_IN_PLACE]}" if self._state.stopped else "/resume"
            await self._control.must(path, {}, call=late, outcome=OUTCOME_UNKNOWN)
            state = "they are held back again" if self._state.stopped else "they go on"
            raise Reason.DEADLINE_EXCEEDED.error(f"the requests did not end in time; {state}") from None
        if not answer.ok:
            error = Reason.ENGINE_FAILED.error(f"vLLM: {answer.message}")
            await self._control.give_up_out_of_step(error, call)
            await memory.restore(self._control, error, call, was_stopped=self._state.stopped)
            raise error

    # Weights.

    async def _commit(
        self, request: verbs_pb2.CommitUpdateRequest, label: str, call: Call
    ) -> list[RankResult] | verbs_pb2.WeightsReport:
        was_open = self._updates.open
        try:
            report = await self._updates.commit(request, label, call)
        finally:
            if was_open and not self._updates.open:
                self._stamps.label = label  # vLLM has the label, even if its pause could not be ended
        if self._state.paused == PAUSE_MODE_RETRACT:
            self._stamps.flushed()  # the retract emptied the cache, and nothing was computed since
        return report

    # Reads.

    async def get_model_info(self, request: verbs_pb2.GetModelInfoRequest, call: Call) -> verbs_pb2.ModelInfo:
        self._check("GetModelInfo")
        info = await self._control.ask("/weight_info", call=call, admin=False)
        config = self._checkpoints.config
        limits = self._facts.limits(config)
        reference = self._checkpoints.reference
        label = str(info["weight_version"])
        return verbs_pb2.ModelInfo(
            model_path=self._updates.checkpoint or self._config.model_path,
            model_type=str(config.get("model_type") or ""),
            architectures=config.get("architectures") or (),
            weight_version=self._stamps.version(label) or common_pb2.WeightVersion(label=label),
            dtype=self._facts.dtype,
            vocab_size=limits.vocab_size,
            context_length=limits.context_length,
            local_parameters=sum(meta.numel for meta in reference.values()) if len(self._layout) == 1 else 0,
            reference=[to_proto(meta) for meta in reference.values()] if request.reference else (),
        )

    async def _loads(self, call: Call) -> verbs_pb2.Loads:
        loads = facts_.loads(str(await self._control.ask("/metrics", call=call, admin=False)))
        loads.max_tokens = self._facts.kv_tokens
        if self._state.stopped:
            # vLLM counts at its steps, and makes no steps now.
            loads.waiting = max(loads.waiting, self._ending.samples - loads.running)
        return loads
