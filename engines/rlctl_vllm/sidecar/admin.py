"""SGLang's admin verbs, carried out by the plug-in, for a vLLM without a coordinator.

For a single engine this module does the work of a coordinator and a stage. Weights of no version are not served. An
update lasts from its first bucket to its end. A former pause is restored, and the version comes last.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Any, get_args, get_origin

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.contract.validation import check
from rlctl.contract.verbs import of_request
from rlctl.engine import Call
from rlctl.sglang_api.request import assign
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.sidecar.requests import Requests

_MODES = {
    "abort": common_pb2.PAUSE_MODE_ABORT,
    "retract": common_pb2.PAUSE_MODE_RETRACT,
    "in_place": common_pb2.PAUSE_MODE_IN_PLACE,
    "drain": common_pb2.PAUSE_MODE_DRAIN,
}
_TAGS = {"kv_cache": common_pb2.MEMORY_TAG_KV_CACHE, "weights": common_pb2.MEMORY_TAG_WEIGHTS}
_FORMATS = {None: verbs_pb2.BUCKET_FORMAT_TENSORS, FLATTENED: verbs_pb2.BUCKET_FORMAT_FLATTENED}
NAME_S = 30.0
_ids = itertools.count(1)


class Admin:
    """The verbs, one at a time. Each verb is a method; the fields of its body are the keyword arguments."""

    def __init__(self, engine: VLLMEngine, requests: Requests) -> None:
        self.engine = engine
        self._requests = requests
        self._lock = asyncio.Lock()
        self._paused = False
        self._dirty = ""
        self._update = ""
        self._held = False  # paused by an update, which may have ended since
        self._flush = False  # requested by the writes of the update
        self._released = False  # some memory is released
        self._frozen = False  # paused in place, by name
        self._buckets = 0
        self._label: str | None = None
        self._sequence = 0

    async def carry_out(self, verb: str, body: Any) -> Any:
        """Carry out a verb and return its answer. Raises errors of the body, and the verb's failure."""
        method: Callable[..., Awaitable[Any]] = getattr(self, verb)
        fields = _checked(method, body)
        async with self._lock:
            return await method(**fields)

    # Generation.

    async def pause_generation(self, mode: str = "abort") -> Any:
        if mode not in _MODES:
            raise Reason.FIELD_INVALID.error(f"mode must be one of {', '.join(_MODES)}", field="mode")
        await self._tell(verbs_pb2.PauseGenerationRequest(mode=_MODES[mode]))
        self._paused = True
        self._held = False  # the pause is the caller's now
        self._frozen = mode == "in_place"
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, torch_empty_cache: bool = True) -> Any:
        """Continue, and commit an update opened by buckets. vLLM empties torch's cache by itself."""
        del torch_empty_cache
        if self._update:
            await self._commit(None)
        self.refuse_dirty()
        await self._go_on()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def release_memory_occupation(self, tags: list[str] | None = None) -> Any:
        report = await self._tell(verbs_pb2.ReleaseMemoryRequest(tags=_tags(tags)))
        self._released = bool(report.released)

    async def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        """Resume memory, and end the pause of an update that ended while memory was released."""
        report = await self._tell(verbs_pb2.ResumeMemoryRequest(tags=_tags(tags)))
        self._released = bool(report.released)
        if self._held and not self._update and not self._dirty:
            await self._resume()

    # Weights.

    async def update_weights_from_disk(
        self,
        *,
        model_path: str,
        load_format: str | None = None,
        abort_all_requests: bool = False,
        weight_version: str | int | None = None,
        flush_cache: bool = True,
        keep_pause: bool = False,
    ) -> Any:
        if self._update:
            raise Reason.UPDATE_IN_PROGRESS.error("buckets of an update have come; its end comes first")
        await self._begin(abort_all_requests)
        self._held = self._held and not keep_pause
        await self._write(verbs_pb2.UpdateWeightsFromDiskRequest(model_path=model_path, load_format=load_format or ""))
        self._flush = flush_cache
        await self._commit(weight_version)
        return _done(f"Loaded {model_path}.")

    async def begin_weight_update(self, selector: str = "all") -> Any:
        if selector not in ("all", "target"):
            raise Reason.UNSUPPORTED.error("vLLM's draft models get no weights", field="selector")
        if self._update:
            raise Reason.UPDATE_IN_PROGRESS.error("an update is open")
        await self._begin(abort_all=False)
        return _done("The update is open.")

    async def end_weight_update(self) -> Any:
        """Close the update; refused if a tensor was not written."""
        if not self._update:
            raise Reason.UPDATE_NOT_FOUND.error("no update is open")
        await self._commit(None)
        return _done("The update is done.")

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> Any:
        request = verbs_pb2.InitWeightsUpdateGroupRequest(
            master_address=master_address, group_name=group_name, backend=backend
        )
        numbers = {"master_port": master_port, "rank_offset": rank_offset, "world_size": world_size}
        for name, number in numbers.items():
            assign(request, name, number, name)
        await self._tell(request)
        return _done("The group stands.")

    async def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Any:
        await self._tell(verbs_pb2.DestroyWeightsUpdateGroupRequest(group_name=group_name))
        return _done("The group is gone.")

    async def update_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        weight_version: str | int | None = None,
        load_format: str | None = None,
    ) -> Any:
        """Receive a bucket: part of an update in an open update or under a pause, otherwise an update of its own."""
        if load_format not in _FORMATS:
            raise Reason.FIELD_INVALID.error("load_format must be null or flattened_bucket", field="load_format")
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise Reason.LENGTH_MISMATCH.error(
                "names, dtypes and shapes must have the same length, 1 or more", field="names"
            )
        bucket = verbs_pb2.TensorBucket(
            names=names,
            dtypes=[f"torch.{name.removeprefix('torch.')}" for name in dtypes],
            format=_FORMATS[load_format],
        )
        for index, shape in enumerate(shapes):
            assign(bucket.shapes.add(), "dims", shape, f"shapes[{index}]")
        alone = not self._update and (self._held or not self._paused)
        if not self._update:
            await self._begin(abort_all_requests)
        bucket.sequence = self._buckets
        await self._write(verbs_pb2.UpdateWeightsFromDistributedRequest(group_name=group_name, buckets=[bucket]))
        self._flush = flush_cache or (self._flush and self._buckets > 0)
        self._buckets += 1
        if alone:
            await self._commit(weight_version)
        elif weight_version is not None:
            self._label = str(weight_version)
        return _done(f"{len(names)} tensors were taken in.")

    async def update_weight_version(self, *, new_version: str | int, abort_all_requests: bool = True) -> Any:
        """Close an open update under this version, or rename the present weights."""
        del abort_all_requests  # requests under way keep the version of their tokens
        if self._update:
            await self._commit(new_version)
        else:
            self.refuse_dirty()
            self._sequence += 1
            label = f"{new_version}@{self._sequence}"
            answer = await self.engine.http.call("/update_weight_version", {"new_version": label}, timeout_s=NAME_S)
            if not answer.ok:
                raise Reason.ENGINE_FAILED.error(f"vLLM: {answer.message}")
        return {**_done("The version is set."), "new_version": new_version}

    async def weights_checker(self, action: str = "checksum") -> Any:
        """Return the digest of the present weights."""
        if action != "checksum":
            raise Reason.UNSUPPORTED.error("vLLM's weights are digested only", field="action")
        results = await self._tell(verbs_pb2.CheckWeightsRequest())
        (digest,) = {result.check.model_digest for result in results}
        return {**_done("Digested."), "model_digest": digest}

    # One update.

    async def _begin(self, abort_all: bool) -> None:
        """Pause unless paused, and open an update. Refused while requests run."""
        if not self._paused:
            if self._requests.active and not abort_all:
                raise Reason.ACTIVE_REQUESTS.error(
                    f"{self._requests.active} requests are active", field="abort_all_requests"
                )
            mode = common_pb2.PAUSE_MODE_ABORT if abort_all else common_pb2.PAUSE_MODE_RETRACT
            await self._tell(verbs_pb2.PauseGenerationRequest(mode=mode))
            self._paused = self._held = True
        self._update, self._buckets, self._label, self._flush = f"sidecar-{next(_ids)}", 0, None, True
        try:
            await self._tell(verbs_pb2.PrepareUpdateRequest(kind=verbs_pb2.UPDATE_KIND_FULL))
        except RlctlError as error:
            await self._give_up(error)
            raise

    async def _write(self, request: Message) -> None:
        try:
            await self._tell(request)
        except RlctlError as error:
            await self._give_up(error)
            raise

    async def _commit(self, label: str | int | None) -> None:
        """Close the update, set the version, then continue. A requested flush retracts requests frozen in place."""
        self._sequence += 1
        name = str(label) if label is not None else self._label or str(self._sequence)
        version = common_pb2.WeightVersion(label=name, sequence=self._sequence)
        try:
            await self._tell(verbs_pb2.CommitUpdateRequest(version=version))
        except RlctlError as error:
            await self._give_up(error)
            raise
        self._update, self._dirty = "", ""
        self.engine.set_version(version)
        if self._flush:
            if self._frozen:
                await self._tell(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_RETRACT))
                self._frozen = False
            await self._tell(verbs_pb2.FlushCacheRequest())
        if self._held:
            await self._resume()

    async def _give_up(self, error: RlctlError) -> None:
        """Abort the update. The former state is restored if nothing was written; otherwise nothing more is served."""
        if self._buckets or error.outcome != common_pb2.OUTCOME_REJECTED:
            self._dirty = error.message
        await self._tell(verbs_pb2.AbortUpdateRequest())
        self._update = ""
        if self._held and not self._dirty:
            await self._resume()

    async def _resume(self) -> None:
        """End an update's own pause, or leave that to the resume of released memory."""
        if not self._released:
            await self._go_on()

    async def _go_on(self) -> None:
        await self._tell(verbs_pb2.ContinueGenerationRequest())
        self._paused = self._held = self._frozen = False

    def refuse_dirty(self) -> None:
        """Raise WEIGHTS_DIRTY while the weights are a mixture."""
        if self._dirty:
            raise Reason.WEIGHTS_DIRTY.error(
                f"an update has failed half-way: {self._dirty}", next_step="Update all of the weights again."
            )

    async def _tell(self, request: Message) -> Any:
        """Carry out a verb at the engine, within the verb's default time limit."""
        check(request)
        verb = of_request(request)
        deadline = asyncio.get_running_loop().time() + verb.deadline_s
        return await getattr(self.engine, verb.method)(request, Call(f"sidecar-{next(_ids)}", deadline, self._update))


VERBS = tuple(
    name
    for name, method in inspect.getmembers(Admin, inspect.iscoroutinefunction)
    if not name.startswith("_") and name != "carry_out"
)
"""Names of the verbs; each is the last part of a path."""


def _checked(method: Callable[..., Awaitable[Any]], body: Any) -> dict[str, Any]:
    """Return the fields of a body, checked by the method's annotations. Raises FIELD_INVALID, FIELD_REQUIRED."""
    if not isinstance(body, dict):
        raise Reason.FIELD_INVALID.error("the body is no JSON object")
    parameters = inspect.signature(method, eval_str=True).parameters
    for name, value in body.items():
        if name not in parameters:
            raise Reason.FIELD_INVALID.error(f"there is no field {name}", field=name)
        if not _fits(value, parameters[name].annotation):
            raise Reason.FIELD_INVALID.error(f"{value!r} is no value for it", field=name)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in body:
            raise Reason.FIELD_REQUIRED.error(f"{name} is required", field=name)
    return body


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits a type: a class, a list of a class, or a union."""
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    kind = type(None) if hint is None else hint
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _tags(names: list[str] | None) -> list[common_pb2.MemoryTag.ValueType]:
    if unknown := sorted(set(names or ()) - _TAGS.keys()):
        raise Reason.FIELD_INVALID.error(f"vLLM has no region {unknown[0]}; it has {', '.join(_TAGS)}", field="tags")
    return [_TAGS[name] for name in names or ()]
