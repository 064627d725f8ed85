"""The steps of a weight update at one rank of an engine server.

Groups, shared segments, checks and digests are those of every rlctl rank; the model decides where a tensor goes.
A request is checked before its first tensor.
"""

# ruff: noqa: ARG002 (every step is given the same)
from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from google.protobuf.message import Message

from rlctl.contract.durations import duration, seconds
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
from rlctl.weights.receiver import Receiver, ReceiveStats
from rlctl.weights.shards.first_rows import first_rows, rows_of, unknown
from rlctl.weights.shards.gather import Gathering
from rlctl.weights.shards.load_hooks import Load, Loading
from rlctl.weights.shards.mismatch import difference
from rlctl.weights.shards.rank_exchange import Exchange
from rlctl.weights.shards.shard_map import ShardMap, model_digest
from rlctl.weights.shared_memory import segment as segments
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.digest import combine, tensor_digests
from rlctl.weights.tensor.placement import device_id, host_id
from rlctl.weights.tensor.tensors import TensorMeta, dtype_name, from_proto
from rlctl_servers.ranks.model import Places, RankModel
from rlctl_servers.ranks.protocol import PROTOCOL
from rlctl_servers.ranks.rank_exchange import Together, agreed

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""How long a rank tries to reach the store of a group that it is to join."""


class Rank:
    """One rank of a server; calls come one after the other, in the engine's own thread."""

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

    def call(self, number: str, verb: str, request: bytes, update_id: str, timeout_s: float) -> bytes:
        """Carry a verb out; request and answer are serialised messages. ``number``: of the call, alike at all ranks."""
        self._number = number
        if verb == "Attach":
            return self._attach(json.loads(request))
        if self._groups is None:
            raise Reason.ILLEGAL_STATE.error("no stage server has attached to this rank")
        if verb == "Meet":
            return self._meet(json.loads(request), timeout_s)
        steps: dict[str, Callable[[Any, str, float], Message | None]] = {
            "InitWeightsUpdateGroup": self._join,
            "DestroyWeightsUpdateGroup": self._leave,
            "PrepareUpdate": self._prepare,
            "UpdateWeightsFromDisk": self._from_disk,
            "UpdateWeightsFromDistributed": self._from_groups,
            "UpdateWeightsFromTensor": self._from_segments,
            "CommitUpdate": self._commit,
            "AbortUpdate": self._abort,
            "CheckWeights": self._check,
            "SendWeights": self._send,
        }
        message = VERBS[verb].request()
        message.ParseFromString(request)
        answer = steps[verb](message, update_id, timeout_s)
        return b"" if answer is None else answer.SerializeToString()

    def _attach(self, request: dict[str, Any]) -> bytes:
        """Take the reference, and describe this rank. An update of an earlier stage server is given up."""
        self._give_up()
        if self._groups is not None:
            self._groups.close()
        self._groups = Groups(address_towards(request["host"]))  # the rank may be on another node
        infos = (v.TensorInfo(name=n, dtype=dtype, shape=v.Shape(dims=dims)) for n, dtype, dims in request["reference"])
        self._reference = {info.name: from_proto(info) for info in infos}
        self._place()
        self._together = Together(self._groups, self._model.rank, self._model.size)
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
        """Take the address where the ranks meet. Returns the model digest of their weights, "" if it cannot be had."""
        host, port = request["store"]
        self._together.store = (host, port)
        try:
            with self._together.exchanging(self._number, timeout_s) as exchange:
                agreed(exchange, partial(self._model.learn, self._reference))
                if not request["digest"]:
                    return b""
                digest = model_digest(self._held(exchange), exchange).digest
        except RlctlError as error:
            if error.outcome == OUTCOME_DIRTY:
                raise
            log.warning("rlctl: the weights of %s cannot be read: %s", self._model.product, error)
            return b""
        if digest == request["expected"]:
            self._model.confirm()
            self._place()
        return digest.encode()

    def _place(self) -> None:
        self._shards = self._model.places(self._reference)
        self._receiver = Receiver(self._shards)

    # Groups.

    def _join(self, request: v.InitWeightsUpdateGroupRequest, update_id: str, timeout_s: float) -> v.GroupReport:
        assert self._groups is not None
        if request.num_ranks and self._model.rank >= request.num_ranks:
            return v.GroupReport(group_name=request.group_name, world_size=request.world_size)
        if request.backend == "nccl" and self._model.device.type != "cuda":
            raise Reason.FIELD_INVALID.error("this rank has no GPU, so it cannot join an nccl group", field="backend")
        place = Membership(
            host=request.master_address,
            port=request.master_port,
            rank=request.rank_offset + (0 if request.paired else self._model.rank),
            world_size=request.world_size,
            backend=request.backend or "gloo",
            pair=self._model.rank if request.paired else None,
        )
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
        """Bring full tensors together at rank 0, which broadcasts them."""
        stream = self._announced.parse(request.buckets, request.group_name)
        if any(bucket.parts for _, bucket in stream):
            raise Reason.UNSUPPORTED.error("an engine server's ranks send full tensors, no parts", field="buckets")
        metas = [meta for _, bucket in stream for meta in bucket.metas]
        for meta in metas:
            if self._shards.reference.get(meta.name) != meta:
                raise Reason.FIELD_INVALID.error(f"{meta} is not what this model has", field="buckets")
        report = v.WeightsReport()
        with self._together.exchanging(self._number, timeout_s) as exchange:
            gathering = Gathering(self._held(exchange).shards, exchange)
            for meta in metas:
                agreed(exchange, partial(self._broadcast, request.group_name, gathering.full(meta.name)))
                report.tensors += 1
        return report

    def _broadcast(self, name: str, full: torch.Tensor | None) -> None:
        """Send a tensor, at the rank that has it."""
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

    def _prepare(self, request: v.PrepareUpdateRequest, update_id: str, timeout_s: float) -> v.WeightsReport:
        """Open an update; an open one is given up. The stage server has checked whether it may be opened."""
        self._give_up()
        self._shards.begin()
        full = request.kind not in (v.UPDATE_KIND_PARTIAL, v.UPDATE_KIND_DELTA)
        self._may_be_nothing = request.kind == v.UPDATE_KIND_DELTA
        self._receiver.begin(update_id, "full" if full else "partial", digest=request.digest_received)
        self._loading = Loading(self._model, Load(update_id, full, request.selector))
        self._model.use_loader("")
        self._report = v.WeightsReport()
        return self._report

    def _from_groups(
        self, request: v.UpdateWeightsFromDistributedRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport:
        assert self._groups is not None
        loading = self._open(update_id)
        stream = self._announced.parse(request.buckets, request.group_name)
        for index, (_, bucket) in enumerate(stream):
            if bucket.parts:
                raise Reason.UNSUPPORTED.error(
                    f"{self._model.product} takes full tensors, no parts", field=f"buckets[{index}].format"
                )
        groups = {name: self._groups.get(name) for name, _ in stream}
        self._shards.refuse_again(
            (meta.name, f"buckets[{index}].names[{number}]")
            for index, (_, bucket) in enumerate(stream)
            for number, meta in enumerate(bucket.metas)
        )
        self._model.use_loader("")
        loading.prepare()
        try:
            # Nothing else ends the wait for a source that says nothing.
            deadline = time.monotonic() + timeout_s
            return self._took(self._receiver.receive([(groups[name], bucket) for name, bucket in stream], deadline))
        except RlctlError as error:
            if error.reason is Reason.GROUP_FAILED:
                # The sources of the others would wait for this rank until their timeout.
                for name, group in groups.items():
                    self._groups.drop(name, group)
            raise self._judged(error) from error

    def _from_disk(self, request: v.UpdateWeightsFromDiskRequest, update_id: str, timeout_s: float) -> v.WeightsReport:
        """Load a checkpoint that the stage server has compared with the reference, and reports on."""
        self._open(update_id)
        try:
            self._model.reload(request)
        except Exception as error:
            cause = f"{self._model.product}: {type(error).__name__}: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_DIRTY) from error
        return v.WeightsReport()

    def _from_segments(
        self, request: v.UpdateWeightsFromTensorRequest, update_id: str, timeout_s: float
    ) -> v.WeightsReport:
        loading = self._open(update_id)
        offered = [segments.from_proto(one, f"segments[{index}]") for index, one in enumerate(request.segments)]
        checked = self._segments.check(offered, self._receiver)
        self._shards.refuse_again(
            (meta.name, f"{segment.field}.tensors[{number}].name")
            for segment in self._segments.mine(offered)
            for number, (meta, _) in enumerate(segment.tensors)
        )
        self._model.use_loader("" if request.load_format == FLATTENED else request.load_format)
        loading.prepare()
        try:
            return self._took(self._segments.read(checked, self._receiver))
        except RlctlError as error:
            raise self._judged(error) from error

    def _commit(self, request: v.CommitUpdateRequest, update_id: str, timeout_s: float) -> v.WeightsReport:
        loading = self._open(update_id)
        missing = self._receiver.incomplete()
        if missing or not (self._receiver.written or self._may_be_nothing):
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise self._judged(
                Reason.WEIGHTS_INCOMPLETE.error(
                    f"{len(missing)} tensors were not written: {shown}" if missing else "nothing was written",
                    metadata={"missing": "\n".join(missing)},
                )
            )
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

    def _check(self, request: v.CheckWeightsRequest, update_id: str, timeout_s: float) -> v.CheckReport:
        if request.action == v.CHECK_ACTION_READ:
            return self._read(request, timeout_s)
        if request.skip_tensors and (request.per_tensor or request.fingerprints or request.expected_digest):
            raise Reason.UNSUPPORTED.error("the digests of the model are over all tensors", field="skip_tensors")
        wants = not request.skip_tensors and (request.model_digest or not request.HasField("model_digest"))
        report = v.CheckReport(action=v.CHECK_ACTION_CHECKSUM)
        every: dict[str, str] = {}
        with self._together.exchanging(self._number, timeout_s) as exchange:
            held = self._held(exchange)
            if wants:
                result = model_digest(held, exchange)
                report.model_digest = result.digest
                report.inconsistent.extend(result.inconsistent)
                every = {name: digest for name, digest in result.every.items() if name not in result.inconsistent}
                if request.fingerprints:
                    report.difference.CopyFrom(difference(held, result, request.fingerprints))
                if request.per_tensor and self._model.rank == 0:
                    report.model_tensors.extend(_listed(held, result.every))
        parts = _digests_of_parts(held, every, request.skip_tensors)
        report.tensor_count, report.rank_digest = len(parts), combine(parts)
        return report

    def _read(self, request: v.CheckWeightsRequest, timeout_s: float) -> v.CheckReport:
        """The values of a tensor's first rows. Raises FIELD_INVALID, UNSUPPORTED."""
        meta = self._shards.reference.get(request.tensor)
        if meta is None:
            raise unknown(request.tensor)
        rows_of(request, meta)
        with self._together.exchanging(self._number, timeout_s) as exchange:
            held = self._held(exchange, {meta.name: meta})
        return v.CheckReport(action=request.action, values=first_rows(request, held.shards[meta.name]))

    def _held(self, exchange: Exchange, only: Mapping[str, TensorMeta] | None = None) -> ShardMap:
        """What every rank computes with, or these tensors of it; refused at all of them where one cannot say."""

        def held() -> ShardMap:
            if self._loading is not None and self._touched:
                raise Reason.ILLEGAL_STATE.error("weights are being written")
            return self._model.held(self._shards.reference if only is None else only)

        return agreed(exchange, held)

    def _open(self, update_id: str) -> Loading:
        if self._loading is None or self._loading.load.update_id != update_id:
            raise Reason.UPDATE_NOT_FOUND.error(f"update {update_id or '(none)'} is not open at this rank")
        return self._loading

    def _took(self, stats: ReceiveStats) -> v.WeightsReport:
        report = self._report
        report.tensors += stats.tensors
        report.bytes_received += stats.bytes_received
        report.transfer.CopyFrom(duration(seconds(report.transfer) + stats.transfer_s))
        report.load.CopyFrom(duration(seconds(report.load) + stats.load_s))
        return report

    def _judged(self, error: RlctlError) -> RlctlError:
        """The error, with what it means for the weights."""
        error.outcome = OUTCOME_DIRTY if self._touched else OUTCOME_REJECTED
        return error

    @property
    def _touched(self) -> bool:
        return self._shards.touched(self._receiver.begun)

    def _give_up(self) -> None:
        if self._loading is not None:
            self._loading.abandon()
            self._loading = None


def _digests_of_parts(held: ShardMap, every: Mapping[str, str], skip: Sequence[str]) -> dict[str, str]:
    """Hex digests of the rank's own parts, by checkpoint name; ``every``: digests of full tensors that are computed."""
    parts = {
        name: shard
        for name, shard in held.shards.items()
        if shard.local.numel() and not any(fragment in name for fragment in skip)
    }
    whole = {
        name: every[name] for name, shard in parts.items() if name in every and shard.slice.whole(shard.meta.shape)
    }
    cut = {name: (shard.local, shard.meta.dtype) for name, shard in parts.items() if name not in whole}
    return {**whole, **tensor_digests(cut)}


def _listed(held: ShardMap, digests: Mapping[str, str]) -> list[v.TensorDigest]:
    return [
        v.TensorDigest(
            name=name,
            dtype=dtype_name(held.shards[name].meta.dtype),
            shape=v.Shape(dims=held.shards[name].meta.shape),
            sha256=digest,
        )
        for name, digest in sorted(digests.items())
    ]
