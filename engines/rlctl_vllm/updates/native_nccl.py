"""vLLM's own NCCL weight transfer engine, for a server without rlctl's extension. Never run on a GPU.

``POST /collective_rpc`` calls the methods of vLLM's workers for this engine at every rank, and answers once every rank
has returned. But if a rank fails, vLLM takes the answers of later ranks for answers to the next call (see
:mod:`.worker_calls`). So at the end every rank is sent a word that it must send back. If a rank sends a different word,
the server is given up: its answers prove nothing until a restart.

Tensors are checked here, by the checkpoint's names and shapes, before the first byte. From the first byte on vLLM
cannot go back.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.rank_calls import out_of_step
from rlctl_servers.updates.version_labels import WRITING

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, not_written
from rlctl.contract.vllm_groups import BACKEND
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.weights.group.network_interfaces import probe
from rlctl.weights.group.rank_groups import PATIENT_S
from rlctl.weights.group.vllm_nccl import unique_id
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.tensors import TensorMeta, castable, dtype_name
from rlctl_vllm.updates.in_step import in_step

ENGINE = "nccl"
"""The only transfer engine of vLLM that rlctl drives."""

WITHOUT_GPU = False
"""Whether the engine is driven on a CPU too; set by tests that replace the engine."""

VERBS = ("InitWeightsUpdateGroup", "DestroyWeightsUpdateGroup", "UpdateWeightsFromDistributed")

_ENDLESS = 1 << 62
"""Byte limit of vLLM's broadcasts, so high that each call is a single broadcast, with the bytes of a bucket."""

Reply = TypeVar("Reply", bound=Message)


class _Load(enum.Enum):
    """State of vLLM's layer-wise reload."""

    CLOSED = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()
    """Closed for vLLM, with half-filled layers. Later tensors would fill up these layers."""


async def obstacle(
    control: Control, config: Mapping[str, Any], label: str, ranks: int, call: Call, *, cpu: bool
) -> str:
    """Return why a server with this configuration and label receives no weights by its own engine, or ""."""
    engine = (config.get("weight_transfer_config") or {}).get("backend", "")
    data_parallel = int((config.get("parallel_config") or {}).get("data_parallel_size") or 1)
    if engine != ENGINE:
        detail = f" (but with {engine})" if engine else ""
        return f"""and without --weight-transfer-config '{{"backend": "{ENGINE}"}}'{detail}"""
    if cpu and not WITHOUT_GPU:
        return f"and its own engine {ENGINE} needs a GPU"
    if data_parallel > 1:
        return "and of several data-parallel engines only the first would answer"
    if ranks > 1 and label == WRITING:
        return "and an update was left open in it: start it again"
    if not await in_step(control, ranks, call):
        return "and answers of its ranks belong to earlier calls, since one has failed: start it again"
    return ""


class Native:
    """The ranks of a server, like :class:`rlctl_vllm.updates.worker_calls.Workers`; a single verb at a time."""

    def __init__(
        self, control: Control, reference: Mapping[str, TensorMeta], ranks: int, host: str, *, interrupted: bool
    ) -> None:
        """``host``: this host's address. ``interrupted``: an update may still be open at the server."""
        self._control = control
        self._reference = reference
        self._ranks = ranks
        self._host = host
        self._load = _Load.BROKEN if interrupted else _Load.CLOSED
        self._group = ""
        self._store = ("", 0)
        self._announced = Announced()
        self._due = 0
        self._written: set[str] = set()
        self._report = v.WeightsReport()
        self._stopping = False
        self._turn = asyncio.Lock()

    def stop(self) -> None:
        """Stop receiving after the present broadcast, which its source sends in any case."""
        self._stopping = True

    async def settle(self, call: Call) -> None:
        """Close an update that is still open."""
        await self._close(call)

    async def each(self, verb: str, request: Message, reply: type[Reply], call: Call) -> list[Reply]:  # noqa: ARG002
        """Return the answers of all ranks, in rank order. Raises as :meth:`Workers.each`."""
        async with self._turn:
            try:
                return cast("list[Reply]", await self._carry_out(request, call))
            except RlctlError as error:
                if self._load is not _Load.CLOSED and error.outcome == OUTCOME_REJECTED:
                    error.outcome = OUTCOME_DIRTY
                raise

    async def _carry_out(self, request: Message, call: Call) -> Sequence[Message]:
        match request:
            case v.InitWeightsUpdateGroupRequest():
                await self._join(request, call)
                return [
                    v.GroupReport(group_name=request.group_name, group_rank=1 + rank, world_size=request.world_size)
                    for rank in range(self._ranks)
                ]
            case v.DestroyWeightsUpdateGroupRequest():
                self._refuse_other(request.group_name)
                await self._leave(call)
            case v.PrepareUpdateRequest():
                await self._prepare(request, call)
            case v.UpdateWeightsFromDistributedRequest():
                await self._take(request, call)
            case v.CommitUpdateRequest():
                await self._commit(call)
            case _:
                await self._close(call)
        return [self._report] * self._ranks  # each rank has confirmed all tensors

    # Groups.

    async def _join(self, request: v.InitWeightsUpdateGroupRequest, call: Call) -> None:
        if request.backend != BACKEND or request.paired or request.world_size != 1 + self._ranks:
            raise Reason.UNSUPPORTED.error(
                f"this vLLM runs without rlctl's extension: it joins {BACKEND} groups of a source and its own "
                f"{self._ranks} ranks",
                field="backend",
            )
        place = (request.master_address, request.master_port)
        if request.group_name == self._group:
            if place == self._store:
                return
            raise Reason.GROUP_EXISTS.error(
                f"group {self._group} stands with the store at {self._store}, not at {place}", field="group_name"
            )
        if request.probe_only:
            patient_s = PATIENT_S if call.update_id else None
            await asyncio.to_thread(probe, place, self._host, timeout_s=_remaining(call), patient_s=patient_s)
            return
        nccl_id = await asyncio.to_thread(unique_id, place, request.group_name, _remaining(call))
        await self._leave(call)
        init_info = {
            "rank_offset": 1,
            "world_size": request.world_size,
            "nccl_unique_id_b64": base64.b64encode(nccl_id).decode(),
            "packed": True,
            "packed_buffer_size_bytes": _ENDLESS,
        }
        await self._tell("init_weight_transfer_engine", call, init_info=init_info)
        self._group, self._store = request.group_name, place

    async def _leave(self, call: Call) -> None:
        """Let vLLM forget its group, if there is any."""
        self._group = ""
        await self._close(call)
        await self._tell("shutdown_weight_transfer_engine", call)

    def _refuse_other(self, name: str) -> None:
        if name != self._group:
            raise Reason.GROUP_NOT_FOUND.error(f"the ranks are in no group {name!r}", field="group_name")

    # Updates.

    async def _prepare(self, request: v.PrepareUpdateRequest, call: Call) -> None:
        if request.kind in (v.UPDATE_KIND_PARTIAL, v.UPDATE_KIND_DELTA):
            # vLLM would fill up a partly received fused layer with the old contents of the memory.
            raise Reason.UNSUPPORTED.error("vLLM's own engine takes full updates", field="kind")
        await self._close(call)
        self._due, self._written, self._report = 0, set(), v.WeightsReport()

    async def _take(self, request: v.UpdateWeightsFromDistributedRequest, call: Call) -> None:
        stream = self._announced.parse(request.buckets, request.group_name)
        received = set(self._written)
        for index, (name, bucket) in enumerate(stream):
            self._refuse_other(name)
            self._refuse_misfit(bucket, self._due + index, received, f"buckets[{index}]")
        self._stopping = False
        await self._open(call)
        for _, bucket in stream:
            for metas in [bucket.metas] if bucket.flattened else [[meta] for meta in bucket.metas]:
                await self._receive(metas, call)
            self._due += 1
            self._written.update(meta.name for meta in bucket.metas)

    async def _receive(self, metas: Sequence[TensorMeta], call: Call) -> None:
        if self._stopping:
            raise Reason.GROUP_FAILED.error(f"group {self._group}: it was interrupted")
        update_info = {
            "names": [meta.name for meta in metas],
            "dtype_names": [dtype_name(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }
        started = time.perf_counter()
        self._load = _Load.BROKEN
        await self._tell("update_weights", call, update_info=update_info)
        self._load = _Load.OPEN
        self._report.tensors += len(metas)
        self._report.bytes_received += sum(meta.nbytes for meta in metas)
        total_s = self._report.transfer.ToTimedelta().total_seconds() + time.perf_counter() - started
        self._report.transfer.CopyFrom(duration(total_s))

    def _refuse_misfit(self, bucket: Bucket, due: int, came: set[str], field: str) -> None:
        """Raise if a bucket cannot come next. ``came``: earlier tensors, to which the bucket's tensors are added."""
        if bucket.sequence != due:
            raise Reason.FIELD_INVALID.error(f"{due} comes next, not {bucket.sequence}", field=f"{field}.sequence")
        if bucket.parts or sum(bucket.broadcasts) != sum(meta.nbytes for meta in bucket.metas):
            raise Reason.UNSUPPORTED.error(
                "vLLM's own transfer receives full tensors without gaps", field=f"{field}.format"
            )
        for index, meta in enumerate(bucket.metas):
            reference = self._reference.get(meta.name)
            if reference is None:
                raise Reason.FIELD_INVALID.error(
                    f"the model has no tensor {meta.name!r}", field=f"{field}.names[{index}]"
                )
            if meta.name in came:  # vLLM counts elements: a repeat would hide a missing tensor
                raise Reason.FIELD_INVALID.error(f"{meta.name} comes twice", field=f"{field}.names[{index}]")
            came.add(meta.name)
            if meta.shape != reference.shape:
                raise Reason.FIELD_INVALID.error(
                    f"{meta.name}: shape {meta.shape} instead of {reference.shape}", field=f"{field}.shapes[{index}]"
                )
            if not castable(meta.dtype, reference.dtype):
                raise Reason.FIELD_INVALID.error(
                    f"{meta.name}: {meta.dtype} instead of {reference.dtype}", field=f"{field}.dtypes[{index}]"
                )

    async def _open(self, call: Call) -> None:
        if self._load is not _Load.OPEN:
            await self._close(call)
            self._load = _Load.BROKEN
            await self._tell("start_weight_update", call)
            self._load = _Load.OPEN

    async def _close(self, call: Call) -> None:
        """Close the reload, so that the weights can be computed with, whole or not."""
        if self._load is _Load.BROKEN:
            # No call between start and finish empties the layers. A refusal means that the reload is open after all.
            await self._control.tell("/collective_rpc", {"method": "start_weight_update"}, call=call)
        if self._load is not _Load.CLOSED:
            await self._tell("finish_weight_update", call)
            self._load = _Load.CLOSED

    async def _commit(self, call: Call) -> None:
        missing = sorted(self._reference.keys() - self._written)
        if missing:
            raise not_written(missing)
        await self._close(call)
        if not await in_step(self._control, self._ranks, call):
            raise out_of_step(self._control)

    async def _tell(self, method: str, call: Call, **arguments: Any) -> None:
        """Call a method at every rank. Raises ENGINE_FAILED, and as :meth:`Control.tell`."""
        answer = await self._control.tell("/collective_rpc", {"method": method, "kwargs": arguments}, call=call)
        if answer.ok and len(answer.body["results"]) == self._ranks:
            return
        cause = f"vLLM, {method}: {answer.message}"
        if not await in_step(self._control, self._ranks, call):
            raise out_of_step(self._control, cause)
        raise Reason.ENGINE_FAILED.error(cause)


def _remaining(call: Call) -> float:
    return max(call.deadline - asyncio.get_running_loop().time(), 0.001)
