"""A fake engine with all rules of a real engine about order, pause and updates, and without a model.

Its weights are a text, as one tensor with a copy at every rank. A checkpoint is a directory with a file
``weights.txt``, and optionally ``digest.txt`` with its declared digest. The digest is the text's SHA-256. The engine
generates numbered tokens at a set pace. Ranks of a stage share a step stream inside one process, so a stage with
followers can be tested without processes. Faults are injected per model path and rank through :data:`FAULTS`.
"""

# ruff: noqa: ARG002, D102 (the interface names and explains the methods)
from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.contract import decode_check
from rlctl.contract.adapter_identity import scale_of
from rlctl.contract.digests import with_key
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import differing
from rlctl.engine import SETUP, Call, Engine, EngineConfig, EngineInfo, KnownOptions
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as verbs
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    TRANSPORT_DISK,
    TRANSPORT_TORCH_GLOO,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    WeightVersion,
    WorkerCoordinates,
)
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout
from rlctl.v1.results_pb2 import RankResult
from rlctl.version import __version__

LEVELS = [
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_PROBE,
]

MODES = [PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN]

TAGS = frozenset({MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS})

Fault = Callable[["FakeEngine", str, Call], Awaitable[None]]
"""Called before a verb method works, with (engine, method name, call); may raise, wait or change the engine."""

FAULTS: dict[tuple[str, int], Fault] = {}
"""Faults by (model path, rank); tests add and remove them."""

TEXT_ID = 1_000_000
"""The single token of every text."""

_STEPS: dict[str, Steps] = {}
_ids = itertools.count(1)


@dataclass
class Steps:
    """The step stream that the ranks of a stage share."""

    number: int = 0
    waiting: dict[str, list[asyncio.Future[int]]] = field(default_factory=dict)

    async def hold(self, command_id: str) -> int:
        """Wait until the command is ordered; return its step."""
        ordered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(command_id, []).append(ordered)
        return await ordered

    def settle(self, command_id: str, error: RlctlError | None) -> int:
        """Order a command, or withdraw it."""
        if error is None:
            self.number += 1
        for future in self.waiting.pop(command_id, ()):
            if not future.done():
                if error is None:
                    future.set_result(self.number)
                else:
                    future.set_exception(error)
        return self.number


def known_options(settings: Mapping[str, str]) -> KnownOptions:
    """Return the settings by name."""
    del settings
    return KnownOptions(frozenset({"pace", "opaque"}), origin="the fake engine")


class FakeEngine(Engine):
    """A rank of a fake engine.

    Options: ``pace`` (seconds per token, default 0.001); ``delay`` (seconds of every ordered verb, default 0: leaves
    time for events in the midst of an update); ``opaque`` ("said" or "unsaid": like an engine server, the engine cannot
    digest its weights and answers once for all ranks; "said" if its capabilities state this).
    """

    name = "fake"
    decode_check_s = 3600.0  # only updates that ask for the check make it

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        self.config = config
        self.weights = ""
        self.fail = on_failure
        self._steps = Steps()
        self._pace = float(config.options.get("pace", "0.001"))
        self._delay = float(config.options.get("delay", "0"))
        self._opaque = config.options.get("opaque", "")
        self.received_names: list[str] | None = None
        self._key = b""
        self._paused: int | None = None
        self._running: dict[str, asyncio.Event] = {}
        self._idle = asyncio.Event()
        self._going = asyncio.Event()
        self._released: frozenset[int] = frozenset()
        self._kept: str | None = None
        self._version = WeightVersion()
        self._snapshot = ""
        self._update = ""
        self._shadow: str | None = None
        self._sealed = False
        self._written = False
        self._full = True
        self._groups: dict[str, tuple[str, int]] = {}
        self._interrupted = asyncio.Event()
        self.adapters: dict[str, verbs.Adapter] = {}
        self.adapter_weights: dict[str, str] = {}
        self._staged: tuple[verbs.Adapter, str] | None = None
        self._pause = 0
        self._held = ""
        self._released_adapter = asyncio.Event()
        self.paused_adapters: set[str] = set()
        self._with_adapter: dict[str, str] = {}
        self.stale_decode: str | None = None

    def setup(self) -> dict[str, str]:
        """Make the step stream, at rank 0."""
        key = str(next(_ids))
        _STEPS[key] = self._steps
        return {"steps": key}

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        if (key := setup.get("steps", "")) not in _STEPS:
            raise Reason.FIELD_INVALID.error(f"no rank 0 of this process has made {key!r}", field=SETUP)
        self._steps = _STEPS[key]
        self.weights = _read(self.config.model_path)
        workers = [
            WorkerCoordinates(rank=rank, tp=rank, node=self.config.node, device="cpu")
            for rank in range(self.config.tp_size)
        ]
        return EngineInfo(
            layout=StageLayout(tp_size=self.config.tp_size, pp_size=1, dp_size=1, ep_size=1, workers=workers),
            capabilities=Capabilities(
                pause_modes=MODES,
                adapter_pause_modes=MODES,
                transports=[TRANSPORT_TORCH_GLOO, TRANSPORT_DISK],
                verification=[VERIFICATION_LEVEL_PROBE] if self._opaque else LEVELS,
                answers_for_ranks=self._opaque == "said",
                memory_tags=sorted(TAGS),
                check_actions=[verbs.CHECK_ACTION_PROBE] if self._opaque else verbs.CheckAction.values()[1:],
                cache_tiers=["kv"],
                staged_apply=True,
                keyed_digests=True,
                decode_check_time=duration(self.decode_check_s),
                keeps_weights=True,
            ),
            checkpoint=self.config.model_path,
            model_digest="" if self._opaque else _digest(self.weights),
        )

    async def stop(self) -> None:
        self._abort(None)

    async def order(self, command_id: str) -> int:
        return self._steps.settle(command_id, None)

    async def withdraw(self, command_id: str) -> None:
        self._steps.settle(command_id, Reason.CANCELLED.error("withdrawn: not every rank accepted it"))

    async def interrupt(self, update_id: str) -> None:
        self._interrupted.set()

    def set_version(self, version: WeightVersion) -> None:
        self._version = version

    async def _begin(self, method: str, call: Call) -> None:
        fault = FAULTS.get((self.config.model_path, self.config.rank))
        if fault is not None:
            await fault(self, method, call)
        call.accept()
        call.step = await self._steps.hold(call.command_id)
        if self._delay:
            await asyncio.sleep(self._delay)

    # Reads.

    async def get_model_info(self, request: verbs.GetModelInfoRequest, call: Call) -> verbs.ModelInfo:
        fault = FAULTS.get((self.config.model_path, self.config.rank))
        if fault is not None:
            await fault(self, "get_model_info", call)
        return verbs.ModelInfo(model_path=self.config.model_path, model_type="fake", weight_version=self._version)

    async def get_server_info(self, request: verbs.GetServerInfoRequest, call: Call) -> verbs.ServerInfo:
        return verbs.ServerInfo(engine="fake", engine_version=__version__, rlctl_version=__version__)

    async def get_loads(self, request: verbs.GetLoadsRequest, call: Call) -> verbs.Loads:
        return verbs.Loads(running=len(self._running), step=self._steps.number)

    async def inspect_checkpoint(self, request: verbs.InspectCheckpointRequest, call: Call) -> verbs.CheckpointReport:
        fault = FAULTS.get((self.config.model_path, self.config.rank))
        if fault is not None:
            await fault(self, "inspect_checkpoint", call)
        digest_file = Path(request.model_path) / "digest.txt"
        return verbs.CheckpointReport(
            tensors=1,
            bytes=len(_read(request.model_path)),
            model_digest=digest_file.read_text() if digest_file.exists() else "",
        )

    # Generation.

    async def pause_generation(self, request: verbs.PauseGenerationRequest, call: Call) -> None:
        mode = request.mode or PAUSE_MODE_ABORT
        if request.adapter:
            await self._begin("pause_generation", call)
            await self._pause_adapter(request.adapter, mode)
            return
        if self._paused == PAUSE_MODE_IN_PLACE and mode == PAUSE_MODE_ABORT and self._running:
            raise Reason.PAUSE_MODE_CONFLICT.error("requests are frozen in place; continue, or pause with retract")
        await self._begin("pause_generation", call)
        if mode == PAUSE_MODE_ABORT:
            self._abort(None)
        if mode == PAUSE_MODE_DRAIN and self._running:
            self._idle.clear()
            await self._idle.wait()
        self._paused = mode
        self._going.clear()

    async def _pause_adapter(self, name: str, mode: int) -> None:
        if mode == PAUSE_MODE_ABORT:
            self._end_users(name, end=True)
        while mode == PAUSE_MODE_DRAIN and self._paused is None and name in self._with_adapter.values():  # noqa: ASYNC110
            await asyncio.sleep(self._pace)
        self.paused_adapters.add(name)
        self._released_adapter.clear()

    async def continue_generation(self, request: verbs.ContinueGenerationRequest, call: Call) -> None:
        await self._begin("continue_generation", call)
        if request.adapter:
            self.paused_adapters.discard(request.adapter)
            self._released_adapter.set()
            return
        self._paused = None
        self._going.set()

    async def abort_requests(self, request: verbs.AbortRequestsRequest, call: Call) -> verbs.AbortReport:
        ended, unknown = self._abort(None if request.abort_all else list(request.rids))
        return verbs.AbortReport(aborted=ended, unknown_rids=unknown)

    async def flush_cache(self, request: verbs.FlushCacheRequest, call: Call) -> verbs.FlushReport:
        """Check the rules of a real engine; there is no cache."""
        await self._begin("flush_cache", call)
        if self._running and self._paused in (None, PAUSE_MODE_IN_PLACE):
            raise Reason.ACTIVE_REQUESTS.error(f"{len(self._running)} requests hold KV entries")
        return verbs.FlushReport(tiers=["kv"])

    async def release_memory(self, request: verbs.ReleaseMemoryRequest, call: Call) -> verbs.MemoryReport:
        await self._begin("release_memory", call)
        tags = frozenset(request.tags) or TAGS
        if MEMORY_TAG_WEIGHTS in tags - self._released:
            self._kept, self.weights = self.weights if request.keep_weights else None, ""
        self._released |= tags
        return self._memory()

    async def resume_memory(self, request: verbs.ResumeMemoryRequest, call: Call) -> verbs.MemoryReport:
        await self._begin("resume_memory", call)
        self._released -= frozenset(request.tags) or TAGS
        if self._kept is not None and MEMORY_TAG_WEIGHTS not in self._released:
            self.weights, self._kept = self._kept, None
        return self._memory()

    def _memory(self) -> verbs.MemoryReport:
        kept_tags = [] if self._kept is None else [MEMORY_TAG_WEIGHTS]
        return verbs.MemoryReport(released=sorted(self._released), kept=kept_tags)  # type: ignore[arg-type]

    # Weights.

    async def prepare_update(self, request: verbs.PrepareUpdateRequest, call: Call) -> verbs.WeightsReport:
        await self._begin("prepare_update", call)
        if request.kind == verbs.UPDATE_KIND_ADAPTER:
            stopped = self._paused or request.pause or request.adapter.name in self.paused_adapters
            if request.abort_all_requests or not stopped:
                self._end_users(request.adapter.name, end=request.abort_all_requests)
            self._update, self._staged, self._pause = call.update_id, (request.adapter, ""), request.pause
            if request.adapter_config.lora_rank:
                request.adapter.scale = scale_of(request.adapter_config)
            self._let_go_on()
            return verbs.WeightsReport()
        staged = request.apply == verbs.APPLY_MODE_STAGED
        if not staged and not request.abort_all_requests:
            self._refuse_active()
        if request.abort_all_requests:
            self._abort(None)
        self._update, self._written, self._sealed = call.update_id, False, False
        self._full = request.kind != verbs.UPDATE_KIND_DELTA
        self._shadow = None if not staged else "" if self._full else self.weights
        self.received_names, self._key = ([] if request.digest_received else None), request.digest_key
        return verbs.WeightsReport()

    def _refuse_active(self) -> None:
        if self._running and self._paused is None:
            raise Reason.ACTIVE_REQUESTS.error(f"{len(self._running)} requests run")

    def _take_in(self, text: str) -> None:
        self._written = True
        if self._shadow is None:
            self.weights = text
        else:
            self._shadow = text

    async def update_weights_from_disk(
        self, request: verbs.UpdateWeightsFromDiskRequest, call: Call
    ) -> verbs.WeightsReport:
        text = _read(request.model_path)
        await self._begin("update_weights_from_disk", call)
        self._take_in(text)
        return verbs.WeightsReport(tensors=1, bytes_received=len(text))

    async def init_weights_update_group(
        self, request: verbs.InitWeightsUpdateGroupRequest, call: Call
    ) -> verbs.GroupReport:
        """Record a group without any connection. Raises GROUP_EXISTS for the same name at a different store."""
        store = request.master_address, request.master_port
        existing = self._groups.get(request.group_name, store)
        if existing != store:
            raise Reason.GROUP_EXISTS.error(
                f"group {request.group_name} stands with the store at {existing}, not at {store}", field="group_name"
            )
        if not request.probe_only:
            self._groups[request.group_name] = store
        rank = request.rank_offset + self.config.rank
        return verbs.GroupReport(group_name=request.group_name, group_rank=rank, world_size=request.world_size)

    async def destroy_weights_update_group(self, request: verbs.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        if request.group_name not in self._groups:
            raise Reason.GROUP_NOT_FOUND.error(f"there is no group {request.group_name!r}", field="group_name")
        del self._groups[request.group_name]

    async def update_weights_from_distributed(
        self, request: verbs.UpdateWeightsFromDistributedRequest, call: Call
    ) -> verbs.WeightsReport:
        """Receive nothing: the weights become the buckets' names. A name "stuck" waits for an interrupt."""
        for name in {bucket.group_name or request.group_name for bucket in request.buckets} - self._groups.keys():
            raise Reason.GROUP_NOT_FOUND.error(f"there is no group {name!r}", field="group_name")
        await self._begin("update_weights_from_distributed", call)
        names = [name for bucket in request.buckets for name in bucket.names]
        if self._staged is not None:
            self._staged = (self._staged[0], ",".join(names))
            return verbs.WeightsReport(tensors=len(names))
        if "stuck" in names:
            self._written = self._shadow is None
            self._interrupted.clear()
            await self._interrupted.wait()
            outcome = OUTCOME_DIRTY if self._written else OUTCOME_REJECTED
            raise Reason.GROUP_FAILED.error("the receive was interrupted", outcome=outcome)
        self._take_in(",".join(names))
        if self.received_names is not None:
            self.received_names += names
        return verbs.WeightsReport(tensors=len(names))

    async def commit_update(
        self, request: verbs.CommitUpdateRequest, call: Call
    ) -> verbs.WeightsReport | list[RankResult]:
        await self._begin("commit_update", call)
        if self._staged is not None:
            adapter, text = self._staged
            if not text:
                raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
            self.adapters[adapter.name], self.adapter_weights[adapter.name] = adapter, text
            self._let_go_on()
            self._update, self._staged = "", None
            return verbs.WeightsReport(tensors=1)
        if not self._written and self._full:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
        if self._shadow is not None:
            self._refuse_active()
            if not self._sealed:
                raise Reason.ILLEGAL_STATE.error("the shadow copy is not sealed")
            self.weights, self._shadow = self._shadow, None
        if request.adapters == verbs.ADAPTER_POLICY_DROP:
            self.adapters.clear()
        self._update = ""
        report = self._completed()
        if self._opaque:
            place = WorkerCoordinates(rank=0, node=self.config.node, device="cpu")
            return [
                RankResult(
                    coordinates=place, outcome=OUTCOME_APPLIED, evidence=EVIDENCE_ENGINE, step=call.step, weights=report
                )
            ]
        return report

    async def seal_update(self, request: verbs.SealUpdateRequest, call: Call) -> verbs.WeightsReport:
        """Complete the shadow copy, or an adapter with stopped requests."""
        await self._begin("seal_update", call)
        if self._staged is not None:
            return await self._seal_adapter(*self._staged)
        if self._shadow is None:
            raise Reason.UPDATE_NOT_FOUND.error("no staged update is open")
        if not self._written and self._full:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
        self._sealed = True
        return self._completed()

    async def _seal_adapter(self, adapter: verbs.Adapter, text: str) -> verbs.WeightsReport:
        if not text:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written")
        runs = self._paused is None and adapter.name not in self.paused_adapters
        if runs and self._pause in (0, PAUSE_MODE_ABORT):
            self._end_users(adapter.name, end=self._pause == PAUSE_MODE_ABORT)
        drains = self._pause == PAUSE_MODE_DRAIN and runs
        while drains and adapter.name in self._with_adapter.values():  # noqa: ASYNC110
            await asyncio.sleep(self._pace)
        self._held = adapter.name
        self._released_adapter.clear()
        return verbs.WeightsReport(tensors=1)

    def _let_go_on(self) -> None:
        self._held = ""
        self._released_adapter.set()

    def _completed(self) -> verbs.WeightsReport:
        digest = "" if self.received_names is None else _digest(",".join(self.received_names), self._key)
        return verbs.WeightsReport(tensors=1, received_digest=digest)

    async def abort_update(self, request: verbs.AbortUpdateRequest, call: Call) -> None:
        await self._begin("abort_update", call)
        self._update, self._shadow, self._staged = "", None, None
        self._let_go_on()

    async def load_adapter(self, request: verbs.LoadAdapterRequest, call: Call) -> verbs.AdapterList:
        """Read an adapter, a text like the weights, and its scale from ``scale.txt``, 1 without such a file."""
        text, scale = _read(request.path, "path"), Path(request.path) / "scale.txt"
        await self._begin("load_adapter", call)
        assert self._staged is not None
        self._staged[0].scale = float(scale.read_text()) if scale.exists() else 1.0
        self._staged = (self._staged[0], text)
        return verbs.AdapterList(adapters=[self._staged[0]])

    async def unload_adapter(self, request: verbs.UnloadAdapterRequest, call: Call) -> verbs.AdapterList:
        if request.name not in self.adapters:
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {request.name!r} is loaded", field="name")
        self._end_users(request.name, end=request.abort_requests)
        await self._begin("unload_adapter", call)
        del self.adapters[request.name]
        return self._listed()

    async def list_adapters(self, request: verbs.ListAdaptersRequest, call: Call) -> verbs.AdapterList:
        return self._listed()

    def _listed(self) -> verbs.AdapterList:
        return verbs.AdapterList(adapters=[adapter for _, adapter in sorted(self.adapters.items())])

    def _end_users(self, name: str, *, end: bool) -> None:
        users = [rid for rid, adapter in self._with_adapter.items() if adapter == name]
        if users and not end:
            raise Reason.ACTIVE_REQUESTS.error(f"{len(users)} requests run with adapter {name!r}")
        self._abort(users)

    async def check_weights(self, request: verbs.CheckWeightsRequest, call: Call) -> verbs.CheckReport:
        """Digest the text."""
        await self._begin("check_weights", call)
        if request.action == verbs.CHECK_ACTION_RESET_TENSORS:
            self.weights = "scrambled"
        if request.action == verbs.CHECK_ACTION_PROBE:
            computed = [
                verbs.ProbePrompt(token_ids=prompt.token_ids, logprobs=logprobs(self.weights, prompt.token_ids))
                for prompt in request.prompts
            ]
            return verbs.CheckReport(action=request.action, probed=computed if self.config.rank == 0 else ())
        if request.action == verbs.CHECK_ACTION_DECODE:
            return self._decode_report()
        if self._opaque:
            raise Reason.UNSUPPORTED.error("this engine cannot digest its weights", field="action")
        if request.action == verbs.CHECK_ACTION_READ:
            return verbs.CheckReport(action=request.action, values=self._rows(request))
        adapter, text = self._adapter(request.adapter) if request.adapter else (None, self.weights)
        key = request.digest_key
        digest = _digest(self._shadow or "" if request.shadow else text, key)
        if request.action == verbs.CHECK_ACTION_SNAPSHOT:
            self._snapshot = digest
        report = verbs.CheckReport(action=request.action, tensor_count=1, model_digest=digest)
        report.rank_digest = "" if key else digest
        if adapter is not None:
            report.adapter_scale = adapter.scale
        if request.action == verbs.CHECK_ACTION_COMPARE:
            expected = request.expected_digest or self._snapshot
            report.matched = int(digest == expected)
            report.changed.extend([] if digest == expected else ["weights"])
        if request.per_tensor:
            report.model_tensors.add(name="weights", sha256=digest[:64])
        if request.fingerprints and differing({"weights": digest[:64]}, request.fingerprints):
            part = verbs.TensorPart(name="weights", digest=digest[:64], differs=True)
            report.difference.CopyFrom(verbs.TensorDifference(count=1, first="weights", part=part, tensors=1))
        return report

    def _decode_report(self) -> verbs.CheckReport:
        """Compare decode and prefill; decode computes with ``stale_decode``, if set."""
        tokens = list(range(4))
        decoded = logprobs(self.weights if self.stale_decode is None else self.stale_decode, tokens)
        likely = [[{0: value} for value in each] for each in (decoded, logprobs(self.weights, tokens))]
        report = decode_check.compare(likely[:1], likely[1:])
        report.tolerance = decode_check.FLOOR
        if decode_check.differs(report):
            raise decode_check.mismatch(report)
        return verbs.CheckReport(action=verbs.CHECK_ACTION_DECODE, decode=report)

    def _rows(self, request: verbs.CheckWeightsRequest) -> verbs.TensorValues | None:
        """Return the text's characters as a tensor of one dimension, with its rows sharded over the ranks."""
        if request.tensor != "weights":
            raise Reason.FIELD_INVALID.error(f"the model has no tensor {request.tensor!r}", field="tensor")
        numbers = [float(ord(character)) for character in self.weights]
        share = -(-len(numbers) // self.config.tp_size)
        start = share * self.config.rank
        values = numbers[: request.rows if request.HasField("rows") else 100][start : start + share]
        if not values:
            return None
        tensor = verbs.TensorValues(name="weights", dtype="torch.float32", dim=0, start=start, values=values)
        tensor.full_shape.dims.append(len(numbers))
        tensor.shape.dims.append(len(values))
        return tensor

    def _adapter(self, name: str) -> tuple[verbs.Adapter, str]:
        if self._staged is not None and self._staged[0].name == name:
            return self._staged
        return self.adapters[name], self.adapter_weights[name]

    async def generate(self, request: rollout.GenerateRequest) -> AsyncGenerator[rollout.GenerateResponse, None]:
        """Number the tokens, at the set pace: from 0 after a text, from the last id on after token ids."""
        rid = request.rid
        if request.adapter:
            if request.adapter not in self.adapters:
                raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {request.adapter!r} is loaded", field="adapter")
            self._with_adapter[rid] = request.adapter
        ended = self._running[rid] = asyncio.Event()
        ids = request.input_ids.ids
        first = ids[-1] + 1 if ids else 0
        params = request.sampling_params
        max_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else 128
        try:
            for count in range(max_tokens + 1):
                while (waits := self._waits(request.adapter)) is not None and not ended.is_set():
                    await _first(waits, ended)
                kind = rollout.FINISH_TYPE_UNSPECIFIED
                if ended.is_set():
                    kind = rollout.FINISH_TYPE_ABORT
                elif count == max_tokens:
                    kind = rollout.FINISH_TYPE_LENGTH
                adapter = self.adapters.get(request.adapter, verbs.Adapter()).version
                part = self._part(rid, count, kind, adapter, (first + count) % 2**32)
                if request.return_logprob:
                    part.samples[0].output_logprobs.extend(
                        rollout.TokenLogprob(token_id=token, logprob=-1.0) for token in part.samples[0].output_ids
                    )
                if request.HasField("text") and not count:
                    part.prompt_ids.append(TEXT_ID)
                if kind and request.return_engine_meta:
                    part.samples[0].engine_meta.update({"fields": request.engine_fields})
                yield part
                if kind:
                    return
                await asyncio.sleep(self._pace)
        finally:
            self._running.pop(rid, None)
            self._with_adapter.pop(rid, None)
            if not self._running:
                self._idle.set()

    def _waits(self, adapter: str) -> asyncio.Event | None:
        """Return the event that stops a request, or None."""
        if self._paused is not None:
            return self._going
        if not adapter or adapter not in {self._held, *self.paused_adapters}:
            return None
        self._released_adapter.clear()  # a different adapter may have set the event
        return self._released_adapter

    def _part(
        self, rid: str, count: int, kind: rollout.FinishType.ValueType, adapter: str, token: int
    ) -> rollout.GenerateResponse:
        sample = rollout.Sample(index=0, completion_tokens=count + (not kind))
        if kind:
            sample.finish_reason.type = kind
        else:
            sample.output_ids.append(token)
            sample.text = f"{token} "
            sample.versions.add(version=self._version, start=count, end=count + 1, adapter_version=adapter)
        return rollout.GenerateResponse(rid=rid, prompt_tokens=1, samples=[sample])

    async def abort(self, request: rollout.AbortRequest) -> rollout.AbortResponse:
        ended, unknown = self._abort(None if request.abort_all else list(request.rids))
        return rollout.AbortResponse(aborted=ended, unknown_rids=unknown)

    def _abort(self, rids: list[str] | None) -> tuple[int, list[str]]:
        targets = list(self._running) if rids is None else list(dict.fromkeys(rids))
        running_rids = [rid for rid in targets if rid in self._running]
        for rid in running_rids:
            self._running[rid].set()
        return len(running_rids), [rid for rid in targets if rid not in self._running]


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in tasks:
            wait.cancel()


def _read(path: str, field: str = "model_path") -> str:
    try:
        return (Path(path) / "weights.txt").read_text()
    except OSError as error:
        raise Reason.CHECKPOINT_NOT_FOUND.error(f"{error.filename}: {error.strerror}", field=field) from None


def logprobs(weights: str, tokens: Sequence[int]) -> list[float]:
    """Return log probabilities between -5 and 0 of a prompt's tokens but the first, computed from the weights."""
    heads = [f"{weights}/{list(tokens[: end + 1])}" for end in range(1, len(tokens))]
    return [-5 * hashlib.sha256(head.encode()).digest()[0] / 255 for head in heads]


def _digest(text: str, key: bytes = b"") -> str:
    return with_key(hashlib.sha256(key + text.encode()).hexdigest(), key)
