"""SGLang-Diffusion: SGLang's server for pictures and videos, attached to as a stage that takes weights.

The scheduler handles requests and admin calls in turn, in the order of arrival. So an answer proves that all earlier
work has ended. An update waits for the running request, and no answer is made with two versions. There is nothing to
pause, and no update while requests run. Requests go to the server's own port, not through rlctl.

The server's answer to a load proves nothing. Unknown names are skipped with success, and after a reported rollback of
all modules some may not be rolled back. So the content of the modules is compared with the files
(:mod:`rlctl_sglang.diffusion.modules`). A module that cannot be compared is never loaded.
"""

# ruff: noqa: ARG002 (the port says which arguments a method has)
from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from rlctl_servers import options as options_
from rlctl_servers.server import server
from rlctl_servers.server.admin_calls import Control, time_left, touched
from rlctl_servers.server.http import Http
from rlctl_servers.server.server_info import check_tags, server_info, without_code, without_levels
from rlctl_servers.server.state import update_open
from rlctl_servers.updates.open_update import opened

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call, Engine, EngineConfig, EngineInfo, KnownOptions
from rlctl.v1 import common_pb2, fleet_pb2, rollout_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_WEIGHTS,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_RETRACT,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_REPLICA,
)
from rlctl.weights.shards.load_hooks import refuse_draft
from rlctl.weights.tensor.digest import combine
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name, to_proto
from rlctl_sglang.diffusion.modules import Pipelines, Sums
from rlctl_sglang.diffusion.server import (
    CHECKER,
    CHECKSUM,
    PRODUCT,
    Server,
    checksums_of,
    refuse_kind,
    refuse_release,
    stats_of,
)
from rlctl_sglang.server.server import DIFFUSION

IDLE_S = 2.0
"""Seconds for a question to an idle scheduler. A server that takes longer is at work."""

START_S = 900.0
_OPTIONS = ("url", "api_key_file", "allowed_roots", "reload")
_PAUSES = (PAUSE_MODE_RETRACT, PAUSE_MODE_DRAIN)
_TIERS = ("conditioning", "teacache")
_ROUTES: Mapping[str, Sequence[str]] = {
    "UpdateWeightsFromDisk": ("/update_weights_from_disk", CHECKSUM),
    "CheckWeights": (CHECKSUM,),
    "ReleaseMemory": ("/release_memory_occupation", "/resume_memory_occupation"),
    "ResumeMemory": ("/resume_memory_occupation",),
}
_WHY = {
    "UpdateWeightsFromTensor": "it takes tensors as pickles only, which nobody could check",
    "LoadAdapter": "its adapters are merged into the weights, which nothing could then be compared with",
    "AbortRequests": "it cannot be told to end requests",
    "GetLoads": "it does not say what waits",
}


async def checkpoint_at(url: str, settings: Mapping[str, str]) -> str:
    """Return the checkpoint of a diffusion server at a URL; see :func:`rlctl.engine.recognise`."""
    info = await server.read_json(PRODUCT, url, "/model_info", options_.key(settings, "api_key_file"))
    return str(info.get("model_path", "")) if info.get("model_type") == DIFFUSION else ""


def known_options(settings: Mapping[str, str]) -> KnownOptions:
    del settings
    return KnownOptions(frozenset(_OPTIONS), origin=PRODUCT)


@dataclass
class _Open:
    """The open update. ``written``: modules that the update has loaded."""

    update_id: str
    kind: verbs_pb2.UpdateKind.ValueType
    written: set[str] = field(default_factory=set)
    report: verbs_pb2.WeightsReport = field(default_factory=verbs_pb2.WeightsReport)


class DiffusionEngine(Engine):
    """An SGLang-Diffusion server of a single GPU, or CPU."""

    name: ClassVar[str] = "sglang-diffusion"

    def __init__(self, config: EngineConfig, on_failure: Callable[[RlctlError], None]) -> None:
        """Raises FIELD_REQUIRED without option ``url``, FIELD_INVALID, and as :class:`Pipelines`."""
        options = config.options
        for name in options.keys() - set(_OPTIONS):
            raise Reason.FIELD_INVALID.error(
                f"there is no option {name!r}; there are: {', '.join(_OPTIONS)}", field=f"options.{name}"
            )
        url = options_.address(options, ())
        if not url:
            raise Reason.FIELD_REQUIRED.error(
                f"{PRODUCT} is not launched, only attached to",
                field="options.url",
                next_step="Start it with `sglang serve --model-path DIR`, and give its address.",
            )
        self._config = config
        self._reload = options.get("reload", "false") == "true"
        if options.get("reload", "false") not in ("true", "false"):
            raise Reason.FIELD_INVALID.error("reload must be true or false", field="options.reload")
        self._pipelines = Pipelines(config.model_path, options_.directories(options.get("allowed_roots", "")))
        self._server = Server(None, Http(PRODUCT, url, options_.key(options, "api_key_file")), self._failed)
        self._control = Control(self._server.http, self._failed)
        self._on_failure = on_failure
        self._failure: RlctlError | None = None
        self._unsupported: dict[str, str] = {}
        self._told: Mapping[str, Any] = {}
        self._live: dict[str, str] = {}
        self._held: dict[str, Sums] = {}
        self._checkpoint = config.model_path
        self._update: _Open | None = None
        self._comparing = asyncio.Lock()
        self._released = False
        self._ready = False
        self._since = time.monotonic()

    # The life of the engine.

    def setup(self) -> dict[str, str]:
        """Return nothing, since a server engine has no followers."""
        return {}

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        """Attach, and compare the modules with the files. Raises UNREACHABLE, UNSUPPORTED, CHECKPOINT_MISMATCH."""
        await self._server.start()
        call = Call("start", asyncio.get_running_loop().time() + START_S)
        routes = set((await self._control.ask("/openapi.json", call=call)).get("paths", ()))
        info = await self._control.ask("/server_info", call=call) if "/server_info" in routes else {}
        version = f"{PRODUCT} {info.get('version', '')}".strip()
        refuse_release(version, routes)
        self._told = {**info, **await self._control.ask("/models", call=call)}
        self._told |= await self._control.ask("/model_info", call=call)
        stats = await stats_of(self._control, call)
        refuse_kind(self._told, stats, self._config.model_path, self._server.http.url, version)
        self._unsupported = {name: f"{PRODUCT} has no such thing" for name in VERBS if name not in set(self.verbs())}
        self._unsupported |= {name: reason for name, reason in _WHY.items() if name in self._unsupported}
        self._unsupported |= without_code(version, _ROUTES, routes)
        await self._look_into(call)
        self._ready = True
        return EngineInfo(
            layout=fleet_pb2.StageLayout(
                tp_size=1,
                pp_size=1,
                dp_size=1,
                ep_size=1,
                workers=[common_pb2.WorkerCoordinates(node=self._config.node)],
            ),
            capabilities=self._capabilities(),
            checkpoint=self._config.model_path,
            model_digest=self._digest(self._held),
            fenced=False,
        )

    async def stop(self) -> None:
        self._failure = self._failure or Reason.STAGE_NOT_SERVING.error("the engine was stopped")
        await self._server.stop()

    def can_restart(self) -> bool:
        """Return True: an operator may restart the server, which is then attached to as a new incarnation."""
        return True

    def _failed(self, error: RlctlError) -> None:
        """Report a server that is gone or stuck, from any thread."""
        if self._failure is None:
            self._failure = error
            self._on_failure(error)

    async def _look_into(self, call: Call) -> None:
        """Find the modules that equal their files. Raises CHECKPOINT_MISMATCH for a changed module."""
        path, names = self._config.model_path, list(self._pipelines.reference)
        sums = await asyncio.to_thread(self._sums, path, "", names, _until(call))
        self._live = await checksums_of(self._control, call)
        changed = [name for name in names if await self._changed(name, sums[name], call)]
        if changed and self._reload:
            await self._control.must(
                "/update_weights_from_disk", {"model_path": path, "target_modules": changed}, call=call
            )
            self._live = await checksums_of(self._control, call)
            changed = [name for name in changed if self._live[name] != sums[name].live]
        if changed:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"the server holds another {changed[0]} than {path}: it was updated, or has cast it to another dtype",
                field="model_path",
                next_step="Start the server with the files' dtype (--dit-precision, --vae-precision). --option "
                "reload=true restores an updated server.",
            )
        self._held = {name: sums[name] for name in names if self._live.get(name) == sums[name].live}
        if not self._held:
            raise Reason.UNSUPPORTED.error(
                f"the server has none of {', '.join(names)} as in their files, so no update could be verified",
                field="model_path",
            )

    async def _changed(self, module: str, sums: Sums, call: Call) -> bool:
        """Return whether the server holds other bytes than a module's files.

        A module with other parameter names cannot be compared, and counts as unchanged.
        """
        if self._live.get(module) in (None, sums.live):
            return False
        names = dict.fromkeys(self._pipelines.reference[module], "0" * 64)  # the digest of nothing
        body = {"target_module": module, "expected_named_tensors_sha256": names}
        answer = await self._control.tell(CHECKER, body, call=call)
        return "failed: missing " not in answer.message

    def _capabilities(self) -> fleet_pb2.Capabilities:
        levels = [VERIFICATION_LEVEL_NONE, VERIFICATION_LEVEL_REPLICA, VERIFICATION_LEVEL_EXPECTED]
        return fleet_pb2.Capabilities(
            pause_modes=_PAUSES,
            transports=[common_pb2.TRANSPORT_DISK],
            verification=levels,
            load_dtypes=sorted({dtype_name(meta.dtype) for meta in self._reference().values()}),
            memory_tags=[] if "ReleaseMemory" in self._unsupported else [MEMORY_TAG_WEIGHTS],
            check_actions=[verbs_pb2.CHECK_ACTION_CHECKSUM],
            cache_tiers=_TIERS,
            experimental=["device.cuda"],
            unsupported=self._unsupported | without_levels(levels, answers_for_ranks=False),
        )

    # Requests go to the server's own port.

    async def generate(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        self._refuse_requests()
        yield rollout_pb2.GenerateResponse()  # pragma: no cover: makes the function a generator

    async def abort(self, request: rollout_pb2.AbortRequest) -> rollout_pb2.AbortResponse:
        self._refuse_requests()

    def _refuse_requests(self) -> NoReturn:
        raise Reason.UNSUPPORTED.error(
            f"{PRODUCT} makes pictures and videos, for which rlctl has no requests",
            next_step=f"Ask it at {self._server.http.url}/v1/images/generations, or /v1/videos.",
        )

    async def pause_generation(self, request: verbs_pb2.PauseGenerationRequest, call: Call) -> None:
        """Wait until the server has ended all earlier work. Raises UNSUPPORTED (SKIPPED), DEADLINE_EXCEEDED."""
        self._check("PauseGeneration")
        if request.mode not in _PAUSES:
            raise Reason.UNSUPPORTED.error(
                f"{PRODUCT} finishes each request first, and can neither end nor freeze requests",
                field="mode",
                next_step="Pause with retract or drain.",
                outcome=OUTCOME_SKIPPED,
            )
        call.accept()
        await stats_of(self._control, call)

    async def continue_generation(self, request: verbs_pb2.ContinueGenerationRequest, call: Call) -> None:
        """Confirm: a pause stops only the routing, at the stage."""
        self._check("ContinueGeneration")
        call.accept()

    async def flush_cache(self, request: verbs_pb2.FlushCacheRequest, call: Call) -> verbs_pb2.FlushReport:
        """Confirm the flush by the load of an update. The server has no separate flush."""
        self._check("FlushCache")
        if not call.update_id:
            raise Reason.UNSUPPORTED.error(f"{PRODUCT} empties its caches with an update only", outcome=OUTCOME_SKIPPED)
        call.accept()
        return verbs_pb2.FlushReport(tiers=_TIERS)

    async def release_memory(self, request: verbs_pb2.ReleaseMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        """Move all modules to the host's memory."""
        self._check("ReleaseMemory")
        check_tags(PRODUCT, request.tags, [MEMORY_TAG_WEIGHTS])
        if self._update is not None:
            raise update_open()
        call.accept()
        if not self._released:
            answer = await self._control.tell("/release_memory_occupation", {}, call=call)
            self._released = True
            if not answer.ok:
                # The release may have gone half-way: everything is resumed before the refusal.
                await self._resume(call, f"{PRODUCT}: {answer.message}")
                raise Reason.MEMORY_NOT_RELEASABLE.error(f"{PRODUCT}: {answer.message}")
        return self._memory()

    async def resume_memory(self, request: verbs_pb2.ResumeMemoryRequest, call: Call) -> verbs_pb2.MemoryReport:
        self._check("ResumeMemory")
        check_tags(PRODUCT, request.tags, [MEMORY_TAG_WEIGHTS])
        call.accept()
        if self._released:
            await self._resume(call, "")
        return self._memory()

    async def _resume(self, call: Call, cause: str) -> None:
        answer = await self._control.tell("/resume_memory_occupation", {}, call=call)
        if not answer.ok:
            raise Reason.ENGINE_FAILED.error(
                "; ".join(filter(None, (cause, f"{PRODUCT}: {answer.message}"))), outcome=OUTCOME_UNKNOWN
            )
        self._released = False

    def _memory(self) -> verbs_pb2.MemoryReport:
        return verbs_pb2.MemoryReport(released=[MEMORY_TAG_WEIGHTS] if self._released else [])

    # Weights.

    async def prepare_update(self, request: verbs_pb2.PrepareUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Open an update. Raises UNSUPPORTED, UPDATE_IN_PROGRESS, MEMORY_RELEASED, ACTIVE_REQUESTS (server at work)."""
        self._check("PrepareUpdate")
        if not call.update_id:
            raise Reason.FIELD_REQUIRED.error("PrepareUpdate opens an update", field="header.fence.update_id")
        if request.kind in (verbs_pb2.UPDATE_KIND_DELTA, verbs_pb2.UPDATE_KIND_ADAPTER):
            kind = verbs_pb2.UpdateKind.Name(request.kind).rpartition("_")[2].lower()
            raise Reason.UNSUPPORTED.error(f"{PRODUCT} takes no {kind} update", field="kind", outcome=OUTCOME_SKIPPED)
        if request.apply == verbs_pb2.APPLY_MODE_STAGED:
            raise Reason.UNSUPPORTED.error(f"{PRODUCT} keeps no shadow copy of its weights", field="apply")
        refuse_draft(request.selector, "selector")
        if self._update is not None and self._update.update_id != call.update_id:
            raise Reason.UPDATE_IN_PROGRESS.error(f"update {self._update.update_id} is open")
        if self._released:
            raise Reason.MEMORY_RELEASED.error("the weights are released and cannot be written")
        call.accept()
        try:
            await stats_of(self._control, Call("idle", min(call.deadline, asyncio.get_running_loop().time() + IDLE_S)))
        except RlctlError as error:
            if error.reason is not Reason.DEADLINE_EXCEEDED:
                raise
            raise Reason.ACTIVE_REQUESTS.error(
                f"{PRODUCT} is at work on a request",
                next_step="Pause with retract or drain, which waits for its end.",
            ) from None
        self._update = _Open(call.update_id, request.kind)
        return self._update.report

    async def update_weights_from_disk(
        self, request: verbs_pb2.UpdateWeightsFromDiskRequest, call: Call
    ) -> verbs_pb2.WeightsReport:
        """Load modules of a fitting checkpoint, and compare the server's modules with the files."""
        self._check("UpdateWeightsFromDisk")
        update = opened(self._update, call)
        call.accept()
        names, sums = await self._vetted(request.model_path, request.load_format, request.target_modules, call)
        all_sums = self._held | sums
        if request.expected_digest and self._digest(all_sums) != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"with {request.model_path} the model's digest is {self._digest(all_sums)}, {request.expected_digest} "
                "was expected",
                field="expected_digest",
            )
        time_left(call, "a load")  # reading may have taken all the time
        options = request.options
        body = {
            "model_path": os.path.dirname(sums[names[0]].files.path),
            "target_modules": names,
            "flush_cache": options.flush_cache if options.HasField("flush_cache") else True,
        }
        live = self._live | {name: sums[name].live for name in names}
        started = time.perf_counter()
        async with self._comparing:
            await self._load(body, live, call)
            try:
                for name in names:
                    sums[name].files.check_unchanged()
            except RlctlError as error:
                raise touched(error) from error
            self._live, self._held = live, all_sums
        self._checkpoint = request.model_path if set(names) == self._held.keys() else self._checkpoint
        metas = [meta for name in names for meta in self._pipelines.reference[name].values()]
        update.written |= set(names)
        update.report.tensors += len(metas)
        update.report.bytes_received += sum(meta.nbytes for meta in metas)
        update.report.load.CopyFrom(duration(time.perf_counter() - started))
        return update.report

    async def _load(self, body: dict[str, Any], wanted: Mapping[str, str], call: Call) -> None:
        """Let the server load modules, and compare all modules with ``wanted``, the expected checksums.

        A refusal without any change is REJECTED, whatever its message. Every other failure is DIRTY or UNKNOWN.
        """
        try:
            answer = await self._control.tell("/update_weights_from_disk", body, call=call)
        except RlctlError as error:
            raise touched(error) from error
        try:
            live = await checksums_of(self._control, call)
        except RlctlError as error:
            error.outcome = OUTCOME_DIRTY
            raise
        if not answer.ok:
            outcome = OUTCOME_REJECTED if live == self._live else OUTCOME_DIRTY
            raise Reason.ENGINE_FAILED.error(f"{PRODUCT}: {answer.message}", outcome=outcome)
        self._refuse_other(live, wanted, f", and says {answer.message!r}")

    def _refuse_other(self, live: Mapping[str, str], wanted: Mapping[str, str], when: str) -> None:
        """Raise DIGEST_MISMATCH (DIRTY) for modules with other checksums than expected."""
        differing = [name for name in wanted if live.get(name) != wanted[name]]
        if differing:
            frozen = [name for name in differing if name not in self._held]
            raise Reason.DIGEST_MISMATCH.error(
                f"{PRODUCT} at {self._server.http.url} holds another {', '.join(differing)} than it should{when}",
                next_step=f"Start the server again: rlctl cannot load {', '.join(frozen)}."
                if frozen
                else "Heal the stage; no other client may load weights at the server's port.",
                metadata={"modules": ",".join(differing)},
                outcome=OUTCOME_DIRTY,
            )

    async def commit_update(self, request: verbs_pb2.CommitUpdateRequest, call: Call) -> verbs_pb2.WeightsReport:
        """Close the update. Raises WEIGHTS_INCOMPLETE if a full update lacks a module, or no module was written."""
        self._check("CommitUpdate")
        update = opened(self._update, call)
        call.accept()
        missing = sorted(self._held.keys() - update.written)
        if missing and (update.kind != verbs_pb2.UPDATE_KIND_PARTIAL or not update.written):
            raise Reason.WEIGHTS_INCOMPLETE.error(
                f"modules were not written: {', '.join(missing)}",
                outcome=OUTCOME_DIRTY if update.written else OUTCOME_REJECTED,
            )
        self._update = None
        return update.report

    async def abort_update(self, request: verbs_pb2.AbortUpdateRequest, call: Call) -> None:
        """Drop the update; written weights stay. Confirms also if no update is open."""
        self._check("AbortUpdate")
        call.accept()
        if self._update is not None:
            opened(self._update, call)
            self._update = None

    async def inspect_checkpoint(
        self, request: verbs_pb2.InspectCheckpointRequest, call: Call
    ) -> verbs_pb2.CheckpointReport:
        """Check a checkpoint as a load does, without the load. The digest is the whole model's after such a load."""
        self._check("InspectCheckpoint")
        names, sums = await self._vetted(request.model_path, request.load_format, request.target_modules, call)
        metas = [meta for name in names for meta in self._pipelines.reference[name].values()]
        return verbs_pb2.CheckpointReport(
            tensors=len(metas),
            bytes=sum(meta.nbytes for meta in metas),
            left=len(self._reference()) - len(metas),
            model_digest=self._digest(self._held | sums),
        )

    async def check_weights(self, request: verbs_pb2.CheckWeightsRequest, call: Call) -> verbs_pb2.CheckReport:
        """Compare the modules with the last confirmed checksums. The model digest is that of the equal files.

        Raises DIGEST_MISMATCH for the expected digest, and (DIRTY) if any module has changed since the last
        confirmation. This includes modules that are never loaded.
        """
        self._check("CheckWeights")
        if request.action not in (verbs_pb2.CHECK_ACTION_UNSPECIFIED, verbs_pb2.CHECK_ACTION_CHECKSUM):
            raise Reason.UNSUPPORTED.error(f"{PRODUCT} only digests", field="action", outcome=OUTCOME_SKIPPED)
        for name in ("fingerprints", "skip_tensors", "adapter"):
            if getattr(request, name):
                raise Reason.UNSUPPORTED.error(f"{PRODUCT} digests modules, whole", field=name)
        call.accept()
        async with self._comparing:
            live = await checksums_of(self._control, call)
            self._refuse_other(live, self._live, "")
            digest = self._digest(self._held)
        if request.expected_digest and digest != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": digest},
            )
        report = verbs_pb2.CheckReport(
            action=verbs_pb2.CHECK_ACTION_CHECKSUM,
            tensor_count=len(self._reference()),
            rank_digest=hashlib.sha256("".join(f"{name}{live[name]}" for name in sorted(live)).encode()).hexdigest(),
            model_digest=digest,
        )
        if request.per_tensor:
            digests = {name: sha256 for sums in self._held.values() for name, sha256 in sums.digests.items()}
            for name, meta in self._reference().items():
                shape = verbs_pb2.Shape(dims=meta.shape)
                report.model_tensors.add(name=name, dtype=dtype_name(meta.dtype), shape=shape, sha256=digests[name])
        return report

    # Reads.

    async def get_model_info(self, request: verbs_pb2.GetModelInfoRequest, call: Call) -> verbs_pb2.ModelInfo:
        self._check("GetModelInfo")
        reference = self._reference()
        return verbs_pb2.ModelInfo(
            model_path=self._checkpoint,
            model_type=DIFFUSION,
            architectures=self._told.get("architectures") or (),
            local_parameters=sum(meta.numel for meta in reference.values()),
            reference=[to_proto(meta) for meta in reference.values()] if request.reference else (),
        )

    async def get_server_info(self, request: verbs_pb2.GetServerInfoRequest, call: Call) -> verbs_pb2.ServerInfo:
        self._check("GetServerInfo")
        uptime = time.monotonic() - self._since
        version = str(self._told.get("version", ""))
        return server_info(self.name, version, self._config.node, 0, uptime, self._told.items(), ())

    # Shared by several verbs.

    def _check(self, verb: str) -> None:
        if self._failure is not None:
            raise self._failure.reason.error(self._failure.message, outcome=OUTCOME_REJECTED)
        if not self._ready:
            raise Reason.ILLEGAL_STATE.error(
                "the engine has not started yet", next_step="Repeat the call after the engine has started."
            )
        if reason := self._unsupported.get(verb):
            raise Reason.UNSUPPORTED.error(f"{verb}: {reason}", outcome=OUTCOME_SKIPPED)

    def _reference(self) -> dict[str, TensorMeta]:
        """Return the tensors of the loadable modules, by name."""
        return {
            f"{module}.{name}": TensorMeta(f"{module}.{name}", meta.dtype, meta.shape)
            for module in self._held
            for name, meta in sorted(self._pipelines.reference[module].items())
        }

    @staticmethod
    def _digest(sums_by_module: Mapping[str, Sums]) -> str:
        """Return the model digest of the modules together, hex."""
        return combine({name: sha256 for sums in sums_by_module.values() for name, sha256 in sums.digests.items()})

    async def _vetted(
        self, path: str, load_format: str, target_modules: Sequence[str], call: Call
    ) -> tuple[list[str], dict[str, Sums]]:
        """Return the modules of a load, by default all loadable modules, and the content after the load.

        Raises before anything is sent.
        """
        names = list(target_modules) or list(self._held)
        for index, name in enumerate(names):
            if name not in self._held:
                loadable = ", ".join(self._held)
                cause = "is not held as its files are" if name in self._live else "is no module of it"
                raise Reason.UNSUPPORTED.error(
                    f"{name} {cause}; modules that can be loaded and compared: {loadable}",
                    field=f"target_modules[{index}]",
                )
        frozen = () if target_modules else [module for module in self._pipelines.reference if module not in self._held]
        return names, await asyncio.to_thread(self._sums, path, load_format, names, _until(call), frozen)

    def _sums(
        self, path: str, load_format: str, names: Collection[str], until: float, frozen: Collection[str] = ()
    ) -> dict[str, Sums]:
        """Digest modules of a checkpoint. Runs in a thread."""
        for name in frozen:
            self._pipelines.refuse_other(path, name, until)
        with self._pipelines.opened(path, load_format, names) as checkpoints:
            return {name: self._pipelines.sums(name, checkpoints[name], until) for name in names}


def _until(call: Call) -> float:
    """Return a call's deadline on ``time.monotonic``, for other threads."""
    return time.monotonic() + call.deadline - asyncio.get_running_loop().time()
