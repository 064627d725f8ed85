"""Control requests of vLLM and SkyRL as verbs. Pure, except for the reading of the body.

The names of vLLM and of SkyRL's first router are read (``master_addr``, ``dtypes``, bodies without ``init_info`` and
``update_info``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract import vllm_groups
from rlctl.contract.enums import number
from rlctl.contract.errors import Reason
from rlctl.gateway.http import engine_urls, weight_fields
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.v1.common_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    TRANSPORT_TORCH_NCCL,
    MemoryTag,
)
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from rlctl.v1.verbs_pb2 import (
    BUCKET_FORMAT_FLATTENED,
    BUCKET_FORMAT_TENSORS,
    ContinueGenerationRequest,
    DestroyWeightsUpdateGroupRequest,
    FlushCacheRequest,
    PauseGenerationRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    UpdateOptions,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
)

SCHEDULING = "scheduling"

_MODES = {
    "abort": (PAUSE_MODE_ABORT, PAUSE_MODE_ABORT),
    "wait": (PAUSE_MODE_DRAIN, PAUSE_MODE_DRAIN),
    "keep": (PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT),
}
"""Pause modes without and with cleared caches. Frozen requests keep KV entries, so a clear needs a retraction."""


async def pause(call: Call) -> list[Message]:
    """Pause; vLLM's clear_cache is a flush."""
    waits = (await call.fields()).take("wait_for_inflight_request", bool, False)
    mode = _mode(call, "wait" if waits else "abort")
    clear = _flag(call, "clear_cache", True)
    steps: list[Message] = [PauseGenerationRequest(mode=_MODES[mode][clear])]
    if clear:
        steps.append(FlushCacheRequest())
    return steps


async def resume(call: Call) -> list[Message]:
    """Continue; an open update is committed first."""
    del call
    return [ContinueGenerationRequest(when_resident=True)]


async def sleep(call: Call) -> list[Message]:
    """Release memory under a pause, as vLLM does. Level 0 is the pause alone; level 1 keeps the weights."""
    fields = await call.fields()
    level = call.query.get("level", fields.take("level", int, 1))
    if str(level) not in ("0", "1", "2"):
        raise Reason.FIELD_INVALID.error(f"level is {level!r}; it must be 0, 1 or 2", field="level")
    steps: list[Message] = [PauseGenerationRequest(mode=_MODES[_mode(call, "abort")][True])]
    if str(level) != "0":
        steps.append(ReleaseMemoryRequest(tags=_tags(call, fields), keep_weights=str(level) == "1"))
    return steps


async def wake_up(call: Call) -> list[Message]:
    """Resume memory. If only scheduling was released, continue."""
    fields = await call.fields()
    tags = _tags(call, fields)
    if not tags and (call.query_all("tags") or fields.values.get("tags")):
        return [ContinueGenerationRequest()]
    return [ResumeMemoryRequest(tags=tags)]


async def reset_prefix_cache(call: Call) -> list[Message]:
    """Drop KV entries. With ``reset_running_requests``, retract running requests, to recompute their entries."""
    fields = await call.fields()
    fields.accept("reset_external")  # every tier is emptied
    steps: list[Message] = [FlushCacheRequest()]
    if not _flag(call, "reset_running_requests", fields.take("reset_running_requests", bool, False)):
        return steps
    reports = [stage.report for stage in await engine_urls.addressed(call)]
    if any(report.released for report in reports):
        return steps  # no running requests
    steps.insert(0, PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    if not any(report.paused for report in reports):
        steps.append(ContinueGenerationRequest())
    return steps


async def init_transfer(call: Call, *, follow: bool) -> list[Message]:
    """Join a group of the trainer. ``follow``: the offset is the first engine's, and each engine's is computed."""
    fields = await call.fields()
    info = call.watch(fields.take_fields("init_info")) if "init_info" in fields.values else fields
    info.rename("master_addr", "master_address")
    info.accept("model_dtype_str", "override_existing_receiver", "override_existing", "packed_num_buffers")
    if info.take("nccl_unique_id_b64", str, None):
        raise Reason.UNSUPPORTED.error(
            "engines meet a trainer at a store", field=info.path("nccl_unique_id_b64"), next_step="Give its address."
        )
    request = weight_fields.group(info, name=vllm_groups.group_name(_packed(info)), backend=await backend(call))
    if follow:
        for stage in await engine_urls.living(call) if engine_urls.slots_of(call) else ():
            if stage.registration.slot == engine_urls.slots_of(call)[0]:
                break
            request.rank_offset += len(stage.registration.layout.workers)
    return [request]


def _packed(info: Fields) -> int:
    """Return the packed bucket size of the source; 0 if updates set it. Raises FIELD_INVALID, FIELD_CONFLICT."""
    most = info.take("packed_buffer_size_bytes", int, vllm_groups.PACKED_BYTES)
    if not info.take("packed", bool, False):
        return 0
    if most < 1:
        raise Reason.FIELD_INVALID.error(
            f"packed_buffer_size_bytes is {most}; it must be 1 or more", field=info.path("packed_buffer_size_bytes")
        )
    if info.take("group_name", str, None) is not None:
        raise Reason.FIELD_CONFLICT.error(
            "packed excludes group_name: the name that rlctl gives to a packed group marks it as packed",
            field=info.path("packed"),
            next_step="Omit group_name, or set packed in every update_info.",
        )
    return most


async def backend(call: Call) -> str:
    """Return the default backend of a group: NCCL if the engines support NCCL."""
    transports = {
        each for stage in await engine_urls.living(call) for each in stage.registration.capabilities.transports
    }
    return "nccl" if TRANSPORT_TORCH_NCCL in transports else "gloo"


async def _standing(call: Call) -> str:
    """Return the latest group: vLLM has a single group, so trainers name the group once at most."""
    for operation in await call.fleet.operations(verb="InitWeightsUpdateGroup", state="ok", page_size=1):
        for rank in (rank for result in operation.stage_results for rank in result.rank_results):
            if rank.group.group_name:
                return rank.group.group_name
    return vllm_groups.GROUP


async def start_update(call: Call) -> list[Message]:
    return _started(await call.fields())


def _started(fields: Fields) -> list[Message]:
    if not fields.take("is_checkpoint_format", bool, True):
        raise Reason.UNSUPPORTED.error("weights come under the checkpoint's names", field="is_checkpoint_format")
    if fields.take("target", str, "model") != "model":
        raise Reason.UNSUPPORTED.error("only the model itself is updated", field="target")
    return [BeginWeightUpdateRequest()]


async def update_weights(call: Call) -> list[Message]:
    return await _taken_in(call, await call.fields())


async def _taken_in(call: Call, fields: Fields) -> list[Message]:
    """Return the request for the tensors in ``update_info``."""
    update_info = fields.take("update_info", dict | list, None)
    infos: list[Any] = update_info if isinstance(update_info, list) else [update_info]
    if not infos:
        raise Reason.FIELD_REQUIRED.error("update_info is empty", field="update_info")
    request = UpdateWeightsFromDistributedRequest(options=UpdateOptions(), group_name=await _standing(call))
    for index, value in enumerate(infos):
        where = f"update_info[{index}]." if isinstance(update_info, list) else "update_info."
        info = fields if update_info is None else call.watch(Fields(value, where))
        info.accept("packed_num_buffers", "sizes", "extras")
        for name in ("ipc_handles", "ipc_handles_pickled"):
            if info.take(name, object, None) is not None:
                raise weight_fields.pickled(f"update_info.{name}", "Send them over a group, or use fleet.publisher().")
        dtypes = "dtype_names" if "dtype_names" in info.values else "dtypes"
        group = info.take("group_name", str, request.group_name)
        agreed_bytes = vllm_groups.packed_bytes(group)
        max_bytes = info.take("packed_buffer_size_bytes", int, agreed_bytes or vllm_groups.PACKED_BYTES)
        if info.take("packed", bool, bool(agreed_bytes)):
            buckets = weight_fields.packed(
                weight_fields.bucket(info, dtypes=dtypes, format=BUCKET_FORMAT_FLATTENED), max_bytes
            )
        else:
            buckets = [weight_fields.bucket(info, dtypes=dtypes, format=BUCKET_FORMAT_TENSORS)]
        for bucket in buckets:
            bucket.group_name = group
        request.buckets.extend(buckets)
        request.weight_version = info.take("weight_version", str, request.weight_version)
    return [request]


async def finish_update(call: Call) -> list[Message]:
    fields = await call.fields()
    fields.accept("target")
    return [CommitWeightUpdateRequest(version=fields.take("weight_version", str, ""))]


async def set_version(call: Call) -> list[Message]:
    """Commit under a label, or relabel the published version."""
    return [CommitWeightUpdateRequest(version=(await call.fields()).take("new_version", str))]


async def shut_down(call: Call) -> list[Message]:
    """Leave the trainer's group."""
    name = (await call.fields()).take("group_name", str, "") or await _standing(call)
    return [DestroyWeightsUpdateGroupRequest(group_name=name)]


async def _reload(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    del call
    path = kwargs.take("weights_path", str, None) or kwargs.take("weight_path", str, None)
    path = path or next((arg for arg in args if isinstance(arg, str)), None)
    if path is None:
        raise Reason.FIELD_REQUIRED.error("weights_path is required", field="kwargs.weights_path")
    return [UpdateWeightsFromDiskRequest(model_path=path, weight_version=kwargs.take("weight_version", str, ""))]


async def _reset(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    del call, kwargs, args
    return [FlushCacheRequest()]


async def _skyrl_start(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    del call, args
    return _started(kwargs)


async def _skyrl_update(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    del args
    return await _taken_in(call, kwargs)


async def _skyrl_finish(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    del call, kwargs, args
    return [CommitWeightUpdateRequest()]


async def _skyrl_sleep(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    """SkyRL's sleep under a pause: the frozen requests are retracted, because their KV entries are lost."""
    del call, args
    kwargs.accept("offload_kv")
    return [PauseGenerationRequest(mode=PAUSE_MODE_RETRACT), ReleaseMemoryRequest()]


async def _skyrl_wake(call: Call, kwargs: Fields, args: Sequence[Any]) -> list[Message]:
    """SkyRL's wake-up: generation stays paused."""
    del args
    return [ResumeMemoryRequest(tags=_tags(call, kwargs))]


METHODS: Mapping[str, Callable[[Call, Fields, Sequence[Any]], Awaitable[list[Message]]]] = {
    "reload_weights": _reload,
    "update_weights_from_path": _reload,
    "reset_prefix_cache": _reset,
    "skyrl_start_weight_update": _skyrl_start,
    "update_weights_nccl": _skyrl_update,
    "update_weights_ipc": _skyrl_update,
    "skyrl_finish_weight_update": _skyrl_finish,
    "skyrl_sleep_for_weight_sync": _skyrl_sleep,
    "skyrl_wake_for_weight_sync": _skyrl_wake,
}
"""Methods for /collective_rpc, including SkyRL's worker extension. Other methods would run by name in the engines."""


async def collective_rpc(call: Call) -> list[Message]:
    fields = await call.fields()
    method = fields.take("method", str)
    fields.accept("timeout")
    if method not in METHODS:
        raise Reason.UNSUPPORTED.error(
            f"{method!r} is not among the methods that may be called: {', '.join(METHODS)}", field="method"
        )
    kwargs, args = call.watch(fields.take_fields("kwargs", {})), fields.take("args", list, [])
    return await METHODS[method](call, kwargs, args)


def _mode(call: Call, default: str) -> str:
    mode = call.query.get("mode", default)
    if mode not in _MODES:
        raise Reason.FIELD_INVALID.error(f"mode is {mode!r}; it must be one of {', '.join(_MODES)}", field="mode")
    return mode


def _flag(call: Call, name: str, default: bool) -> bool:
    value = call.query.get(name)
    if value is None:
        return default
    if value.lower() not in ("true", "false", "1", "0"):
        raise Reason.FIELD_INVALID.error(f"{value!r} is neither true nor false", field=name)
    return value.lower() in ("true", "1")


def _tags(call: Call, fields: Fields) -> list[Any]:
    """Return the memory regions in the query or the body; empty for all regions."""
    tags = call.query_all("tags") or fields.take_list("tags", str, ())
    return [number(MemoryTag.DESCRIPTOR, tag, "tags") for tag in tags if tag != SCHEDULING]
