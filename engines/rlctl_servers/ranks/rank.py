"""The steps of a weight update at one rank of an engine server.

Groups, shared segments, checks and digests are those of every rlctl rank; the model decides the place of a tensor. A
request is checked before its first tensor.
"""

# ruff: noqa: ARG002 (every step is given the same)
from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

import torch
from google.protobuf.message import Message

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.payload import FLATTENED
from rlctl.contract.verbs import VERBS
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.version import __version__
from rlctl.weights.group.network_interfaces import address_towards
from rlctl.weights.group.process_group import LONGEST_S
from rlctl.weights.group.rank_groups import Groups, Membership
from rlctl.weights.group.sender import wire_device
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.first_rows import first_rows, rows_of, unknown
from rlctl.weights.shards.gather import Gathering
from rlctl.weights.shards.load_hooks import Load, Loading
from rlctl.weights.shards.rank_exchange import Exchange, agree_to_go_on
from rlctl.weights.shards.shard_map import ShardMap, model_digest
from rlctl.weights.shared_memory import segment as segments
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.placement import device_id, host_id
from rlctl.weights.tensor.tensors import TensorMeta, from_proto
from rlctl.weights.tensor.work import Stop
from rlctl_servers.ranks import adapter_files
from rlctl_servers.ranks.background import Background
from rlctl_servers.ranks.checks import checksum, refuse_check
from rlctl_servers.ranks.model import Places, RankModel
from rlctl_servers.ranks.protocol import PROTOCOL
from rlctl_servers.ranks.rank_exchange import Together, agreed
from rlctl_servers.ranks.receiving import check_complete, groups_of, receive
from rlctl_servers.ranks.staged_update import StagedUpdate

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Seconds that a rank tries to reach the store of a group that it is to join."""


class Rank:
    """One rank of a server. Calls run in turn, on the engine's own thread."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._segments = SegmentReader(model.device, rank=model.rank)
        self._announced = Announced()
        self._groups: Groups | None = None
        self._number = ""
        self._shards = Places({})
        self._reference: dict[str, TensorMeta] = {}
        self._receiver = Receiver(self._shards)
        self._loading: Loading | None = None
        self._may_be_nothing = False
        self._report = v.WeightsReport()
        self._staged: StagedUpdate | None = None
        self._background = Background(model.device)
        self._background_segments = SegmentReader(model.device, rank=model.rank)

    def call(self, number: str, verb: str, request: bytes, update_id: str, timeout_s: float) -> bytes | Future[bytes]:
        """Carry out a verb. Request and answer are serialised messages. ``number``: number of the call, equal at all
        ranks.

        A step of a staged update runs in the background, and is answered by a future.
        """
        self._number = number
        if verb == "Attach":
            return self._attach(json.loads(request))
        if self._groups is None:
            raise Reason.ILLEGAL_STATE.error("no stage server has attached to this rank")
        if verb == "Meet":
            return self._meet(json.loads(request), timeout_s)
        steps: dict[str, Callable[[Any, str, float], Message | Future[bytes] | None]] = {
            "InitWeightsUpdateGroup": self._join,
            "DestroyWeightsUpdateGroup": self._leave,
            "PrepareUpdate": self._prepare,
            "UpdateWeightsFromDisk": self._from_disk,
            "UpdateWeightsFromDistributed": self._from_groups,
            "UpdateWeightsFromTensor": self._from_segments,
            "SealUpdate": self._seal,
            "CommitUpdate": self._commit,
            "AbortUpdate": self._abort,
            "CheckWeights": self._check,
            "SendWeights": self._send,
            "ListAdapters": self._list_adapters,
            "InspectCheckpoint": self._inspect_adapter,
        }
        message = VERBS[verb].request()
        message.ParseFromString(request)
        answer = steps[verb](message, update_id, timeout_s)
        return answer if isinstance(answer, Future) else _serialised(answer)

    def _attach(self, request: dict[str, Any]) -> bytes:
        """Set the reference, and describe this rank. An update of an earlier stage server is given up."""
        self._give_up()
        if self._groups is not None:
            self._groups.close()
        self._groups = Groups(address_towards(request["host"]))  # the rank may be on a different node
        infos = (v.TensorInfo(name=n, dtype=dtype, shape=v.Shape(dims=dims)) for n, dtype, dims in request["reference"])
        self._reference = {info.name: from_proto(info) for info in infos}
        self._place()
        self._together = Together(self._groups, self._model.rank, self._model.size)
        self._background_together = Together(self._groups, self._model.rank, self._model.size)
        me = {
            "rank": self._model.rank,
            "size": self._model.size,
            "device": device_id(self._model.device),
            "host_id": host_id(),
            "pid": os.getpid(),
            "protocol": PROTOCOL,
            "rlctl": __version__,
            "learned": self._model.learned(self._reference),
            "confirmed": self._model.confirmed,
            "store": self._groups.store_address if self._model.rank == 0 else None,
        }
        return json.dumps(me).encode()

    def _meet(self, request: dict[str, Any], timeout_s: float) -> bytes:
        """Set the address where the ranks meet.

        Return "digest", the model digest of their weights or "", and "unstaged", why updates cannot be staged.
        """
        digest = self._learn(request, timeout_s)
        try:
            unstaged = self._model.unstaged(self._reference)
        except RlctlError as error:
            unstaged = error.message
        return json.dumps({"digest": digest, "unstaged": unstaged}).encode()

    def _learn(self, request: dict[str, Any], timeout_s: float) -> str:
        host, port = request["store"]
        self._together.store = self._background_together.store = (host, port)
        try:
            with self._together.exchanging(self._number, timeout_s) as exchange:
                agreed(exchange, partial(self._model.learn, self._reference))
                if not request["digest"]:
                    return ""
                digest = model_digest(self._held(exchange), exchange).digest
        except RlctlError as error:
            if error.outcome == OUTCOME_DIRTY:
                raise
            log.warning("rlctl: the weights of %s cannot be read: %s", self._model.product, error)
            return ""
        if digest == request["expected"]:
            self._model.confirm()
            self._place()
        return digest

    def _place(self) -> None:
        self._shards = self._model.places(self._reference)
        self._receiver = Receiver(self._shards)

    def _list_adapters(self, request: v.ListAdaptersRequest, update_id: str, timeout_s: float) -> v.AdapterList:
        """Return the adapters that this rank has loaded, by the server's names."""
        return v.AdapterList(adapters=[v.Adapter(name=name) for name in self._model.adapters()])

    def _inspect_adapter(self, request: v.InspectCheckpointRequest, update_id: str, timeout_s: float) -> Future[bytes]:
        """Digest the files of an adapter, as this rank's host has them."""
        return self._later(partial(adapter_files.report, request.model_path))

    # Groups.

    def _join(self, request: v.InitWeightsUpdateGroupRequest, update_id: str, timeout_s: float) -> v.GroupReport:
        assert self._groups is not None
        place = Membership.of(request, self._model.rank, self._model.device)
        if place is None:
            return v.GroupReport(group_name=request.group_name, world_size=request.world_size)
        if place.rank >= request.world_size:
            raise Reason.FIELD_INVALID.error(
                f"rank {place.rank} is not in a group of {request.world_size}", field="rank_offset"
            )
        # The engine computes nothing while a rank waits for a store.
        limit = timeout_s if request.probe_only else min(timeout_s, PROBE_S)
        probed = self._groups.probe(request.group_name, place, timeout_s=limit, update_id=update_id)
        if request.probe_only:
            return probed
        limit = seconds(request.group_timeout) or LONGEST_S
        return self._groups.join(
            request.group_name,
            place,
            timeout_s=min(timeout_s, limit),
            broadcast_timeout_s=limit,
            update_id=update_id,
        )

    def _leave(self, request: v.DestroyWeightsUpdateGroupRequest, update_id: str, timeout_s: float) -> None:
        assert self._groups is not None
        self._groups.leave(request.group_name)

    def _send(self, request: v.SendWeightsRequest, update_id: str, timeout_s: float) -> v.WeightsReport:
        """Gather full tensors at rank 0 and broadcast them."""
        report = v.WeightsReport()
        with self._together.exchanging(self._number, timeout_s) as exchange:
            metas = agreed(exchange, partial(self._tensors_to_send, request))
            gathering, stop = Gathering(self._held(exchange).shards, exchange), Stop()
            for meta in metas:
                full = gathering.full(meta.name, stop)
                with stop.on_error():
                    self._broadcast(request.group_name, full)
                report.tensors += 1
            agree_to_go_on(exchange, stop)
        return report

    def _tensors_to_send(self, request: v.SendWeightsRequest) -> list[TensorMeta]:
        """Return the tensors of the request in order. Raises FIELD_INVALID, UNSUPPORTED."""
        stream = self._announced.parse(request.buckets, request.group_name)
        if any(bucket.parts for _, bucket in stream):
            raise Reason.UNSUPPORTED.error("an engine server's ranks send full tensors, no parts", field="buckets")
        metas = [meta for _, bucket in stream for meta in bucket.metas]
        for meta in metas:
            if self._shards.reference.get(meta.name) != meta:
                raise Reason.FIELD_INVALID.error(f"{meta} is not a tensor of this model", field="buckets")
        return metas

    def _broadcast(self, name: str, full: torch.Tensor | None) -> None:
        """Broadcast a tensor, at the rank that has it."""
        assert self._groups is not None
        if full is None:
            return
        try:
            group = self._groups.get(name)
            group.broadcast(full.to(wire_device(group, full.device)))
        except RlctlError as error:
            error.outcome = OUTCOME_REJECTED
            raise

    # Updates.

    def _prepare(
        self, request: v.PrepareUpdateRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport | Future[bytes]:
        """Give up an open update, and open this update. The stage server has checked whether it may be opened."""
        self._give_up()
        full = request.kind not in (v.UPDATE_KIND_PARTIAL, v.UPDATE_KIND_DELTA)
        load = Load(update_id, full, request.selector)
        if request.apply == v.APPLY_MODE_STAGED:
            return self._prepare_staged(load, request)
        self._shards.begin()
        self._may_be_nothing = request.kind == v.UPDATE_KIND_DELTA
        kind: Literal["full", "partial"] = "full" if full else "partial"
        self._receiver.begin(update_id, kind, digest=request.digest_received, key=request.digest_key)
        self._loading = Loading(self._model, load)
        self._model.use_loader("")
        self._report = v.WeightsReport()
        return self._report

    def _prepare_staged(self, load: Load, request: v.PrepareUpdateRequest) -> Future[bytes]:
        assert self._groups is not None
        self._staged = StagedUpdate(
            self._model,
            self._model.shadow(self._reference, load),
            load,
            request,
            self._groups,
            self._background_segments,
        )
        return self._later(self._staged.prepare)

    def _from_groups(
        self, request: v.UpdateWeightsFromDistributedRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport | Future[bytes]:
        assert self._groups is not None
        stream = self._announced.parse(request.buckets, request.group_name)
        if self._staged is not None:
            return self._later(partial(self._staged_of(update_id).from_groups, stream, timeout_s))
        loading = self._open(update_id)
        joined = groups_of(stream, self._groups, self._model.product)
        self._shards.refuse_again(
            (meta.name, f"buckets[{index}].names[{number}]")
            for index, (_, bucket) in enumerate(stream)
            for number, meta in enumerate(bucket.metas)
        )
        self._model.use_loader("")
        loading.prepare()
        try:
            return receive(stream, joined, self._groups, self._receiver, timeout_s).add_to(self._report)
        except RlctlError as error:
            raise self._judged(error) from error

    def _from_disk(
        self, request: v.UpdateWeightsFromDiskRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport | Future[bytes]:
        """Load a checkpoint that the stage server has compared with the reference, and reports on."""
        if self._staged is not None:
            return self._later(partial(self._staged_of(update_id).from_disk, request))
        self._open(update_id)
        try:
            self._model.reload(request)
        except Exception as error:
            cause = f"{self._model.product}: {type(error).__name__}: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_DIRTY) from error
        return v.WeightsReport()

    def _from_segments(
        self, request: v.UpdateWeightsFromTensorRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport | Future[bytes]:
        if self._staged is not None:
            return self._later(partial(self._staged_of(update_id).from_segments, request))
        loading = self._open(update_id)
        message_segments = [
            segments.from_proto(message, f"segments[{index}]") for index, message in enumerate(request.segments)
        ]
        checked = self._segments.check(message_segments, self._receiver)
        self._shards.refuse_again(
            (meta.name, f"{segment.field}.tensors[{number}].name")
            for segment in self._segments.for_this_rank(message_segments)
            for number, (meta, _) in enumerate(segment.tensors)
        )
        self._model.use_loader("" if request.load_format == FLATTENED else request.load_format)
        loading.prepare()
        try:
            return self._segments.read(checked, self._receiver).add_to(self._report)
        except RlctlError as error:
            raise self._judged(error) from error

    def _seal(self, request: v.SealUpdateRequest, update_id: str, timeout_s: float) -> Future[bytes]:
        return self._later(self._staged_of(update_id).seal)

    def _commit(self, request: v.CommitUpdateRequest, update_id: str, timeout_s: float) -> v.WeightsReport:
        if self._staged is not None:
            report = self._staged_of(update_id).swap()
            self._staged = None
            return report
        loading = self._open(update_id)
        try:
            check_complete(self._receiver, may_be_nothing=self._may_be_nothing)
        except RlctlError as error:
            raise self._judged(error) from error
        try:
            loading.finalise()
        except Exception as error:
            cause = f"{self._model.product}'s loaders: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_DIRTY) from error
        self._report.received_digest = self._receiver.received_digest
        self._receiver.finish()
        self._loading = None
        return self._report

    def _abort(self, request: v.AbortUpdateRequest, update_id: str, timeout_s: float) -> None:
        self._give_up()

    def _check(self, request: v.CheckWeightsRequest, update_id: str, timeout_s: float) -> v.CheckReport | Future[bytes]:
        if request.action == v.CHECK_ACTION_READ:
            return self._read(request, timeout_s)
        refuse_check(request)
        if request.shadow:
            return self._later(partial(self._check_shadow, request, self._staged, update_id, self._number, timeout_s))
        with self._together.exchanging(self._number, timeout_s) as exchange:
            return checksum(request, self._held(exchange), exchange, first_rank=self._model.rank == 0)

    def _check_shadow(
        self,
        request: v.CheckWeightsRequest,
        staged: StagedUpdate | None,
        update_id: str,
        number: str,
        timeout_s: float,
    ) -> v.CheckReport:
        """Digest the copy of a staged update. ``number``: number of the call, equal at all ranks."""
        with self._background_together.exchanging(number, timeout_s) as exchange:
            shards = agreed(exchange, lambda: _of_update(staged, update_id).shards)
            return checksum(request, shards, exchange, first_rank=self._model.rank == 0)

    def _read(self, request: v.CheckWeightsRequest, timeout_s: float) -> v.CheckReport:
        """Return the values of a tensor's first rows. Raises FIELD_INVALID, UNSUPPORTED."""
        with self._together.exchanging(self._number, timeout_s) as exchange:
            meta = agreed(exchange, partial(self._tensor_to_read, request))
            shard_map = self._held(exchange, {meta.name: meta})
        return v.CheckReport(action=request.action, values=first_rows(request, shard_map.shards[meta.name]))

    def _tensor_to_read(self, request: v.CheckWeightsRequest) -> TensorMeta:
        meta = self._shards.reference.get(request.tensor)
        if meta is None:
            raise unknown(request.tensor)
        rows_of(request, meta)
        return meta

    def _held(self, exchange: Exchange, only: Mapping[str, TensorMeta] | None = None) -> ShardMap:
        """Return the weights that the ranks compute with, or only these tensors. All ranks refuse if a rank does."""

        def held() -> ShardMap:
            if self._loading is not None and self._touched:
                raise Reason.ILLEGAL_STATE.error("weights are being written")
            return self._model.held(self._shards.reference if only is None else only)

        return agreed(exchange, held)

    def _open(self, update_id: str) -> Loading:
        if self._loading is None or self._loading.load.update_id != update_id:
            raise Reason.UPDATE_NOT_FOUND.error(f"update {update_id or '(none)'} is not open at this rank")
        return self._loading

    def _staged_of(self, update_id: str) -> StagedUpdate:
        return _of_update(self._staged, update_id)

    def _later(self, step: Callable[[], Message]) -> Future[bytes]:
        return self._background.submit(lambda: _serialised(step()))

    def _judged(self, error: RlctlError) -> RlctlError:
        """Set the outcome of an error by its effect on the weights."""
        error.outcome = OUTCOME_DIRTY if self._touched else OUTCOME_REJECTED
        return error

    @property
    def _touched(self) -> bool:
        return self._shards.touched(self._receiver.begun)

    def _give_up(self) -> None:
        if self._loading is not None:
            self._loading.abandon()
            self._loading = None
            self._receiver.finish()
        if self._staged is not None:
            self._staged.abandon()
            self._staged = None


def _of_update(staged: StagedUpdate | None, update_id: str) -> StagedUpdate:
    """Return the staged update of this id. Raises UPDATE_NOT_FOUND."""
    if staged is None or staged.load.update_id != update_id:
        raise Reason.UPDATE_NOT_FOUND.error(f"no staged update {update_id or '(none)'} is open at this rank")
    return staged


def _serialised(answer: Message | None) -> bytes:
    return b"" if answer is None else answer.SerializeToString()
