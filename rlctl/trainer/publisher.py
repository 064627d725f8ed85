"""Sends a model's weights from a trainer to every rank of the engines, as one update.

``publisher.update(model, version="step-42")`` opens the update at the coordinator. The publisher forms a process group
with every target rank, or keeps the group of the last update. The publisher broadcasts and digests the tensors bucket
by bucket while the ranks place their parts, and commits. The version is served once every target has proved the
weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlctl.contract.durations import duration, seconds
from rlctl.contract.enums import number
from rlctl.contract.errors import Reason
from rlctl.contract.group_backends import BACKENDS
from rlctl.runtime.event_loops import LoopThread
from rlctl.trainer.lead import RENEW_S, Leading
from rlctl.trainer.member import follow
from rlctl.trainer.member_streams import MISSED, Lead, Members, share
from rlctl.trainer.pending_update import AsyncPending, Pending, UpdateState
from rlctl.trainer.probe import Probe
from rlctl.trainer.progress_reports import OnProgress, refuse_unusable, reporting
from rlctl.trainer.source_rank import STOP_S, Part, detail, stopped
from rlctl.trainer.traces import traced
from rlctl.trainer.update_result import UpdateResult
from rlctl.trainer.weights_pass import in_thread
from rlctl.transport.tls.credentials import load_tls
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import ErrorDetail, RequestHeader, WeightVersion
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.trainer_pb2 import Sent
from rlctl.v1.update_pb2 import (
    DATA_PATH_BROADCAST,
    DATA_PATH_IPC,
    DATA_PATH_UNSPECIFIED,
    BeginWeightUpdateRequest,
    RolloutStrategy,
    Trainer,
)
from rlctl.weights.formats import lora
from rlctl.weights.group.network_interfaces import address_on, own_address
from rlctl.weights.tensor.cuda_ordering import trainer_stream
from rlctl.weights.tensor.keyed_digest import outpaces_sha256
from rlctl.weights.tensor.source import Weights, WeightSource
from rlctl.weights.tensor.tensors import dtype_name

if TYPE_CHECKING:
    from rlctl.client.admin import AsyncAdmin

log = logging.getLogger(__name__)

DEADLINE_S = 600.0
LEASE_TTL_S = 30.0

_PATHS = {"auto": DATA_PATH_UNSPECIFIED, "broadcast": DATA_PATH_BROADCAST, "ipc": DATA_PATH_IPC}
_TRANSPORTS = {backend: transport for transport, backend in BACKENDS.items()}

BUCKET_BYTES = 16 << 20
GRACE_S = 5.0


class AsyncPublisher(contextlib.AbstractAsyncContextManager["AsyncPublisher"]):
    """Sends one model's weights. Create one publisher per trainer process: its groups outlive an update.

    In a multi-process trainer, all ranks call :meth:`update` together. Rank 0 of the trainer's group is the lead and
    calls the coordinator. Sources send their tensors. All other ranks iterate over their weights too, because gathering
    takes every rank.
    """

    def __init__(
        self,
        fleet: AsyncAdmin | None,
        model: str,
        *,
        trainer_group: dist.ProcessGroup | None = None,
        source: int | None = None,
        path: str = "broadcast",
        backend: str | Sequence[str] = "gloo",
        bucket_bytes: int = BUCKET_BYTES,
        host: str = "",
        network: str = "",
        trainer: str = "",
        incarnation: int = 0,
    ) -> None:
        """Raises FIELD_CONFLICT and FIELD_INVALID for unusable settings.

        Args:
            fleet: the fleet at trainer rank 0, None at all other ranks.
            trainer_group: torch process group of all trainer ranks; None for a single process.
            source: number of this rank as a source, from 0 without gaps. None for a rank that only takes part in
                gathering. By default rank 0 is the only source.
            path: broadcast, ipc (shared memory, for engines on this host) or auto. auto takes ipc for an engine whose
                ranks all share memory with every source, and broadcast otherwise. Without room in /dev/shm for four
                times the largest tensor per source, auto broadcasts to all. Shared memory is on the GPU if the source's
                current CUDA device is the device of all ranks that read it.
            backend: backend of the broadcast groups. gloo goes through the hosts' memory. nccl goes from the source's
                current CUDA device to the devices of the ranks, and all of these devices must differ. vllm_nccl does
                the same for attached vLLM servers without rlctl's extension, by vLLM's own engine, in one group per
                server. Of several backends, each engine gets the first that it offers. One pass through the weights
                feeds the groups of all backends.
            bucket_bytes: size of a broadcast bucket. Segments are as large as /dev/shm has room for.
            host: address of this process, as reached by the engines' ranks and the other trainer ranks; 127.0.0.1 by
                default. The groups' store and the source bind the address.
            network: in place of ``host``, an interface ("eth0") or a network ("10.0.0.0/8") with an address of this
                process. A network can be the same text on every host of the trainer.
            trainer: name for messages.
            incarnation: number to raise when training resumes from an older checkpoint. Once it has updated the model,
                lower numbers, also the default, raise TRAINER_FENCED. The journal keeps the number.
        """
        self._rank = 0 if trainer_group is None else dist.get_rank(trainer_group)
        if (self._rank == 0) != (fleet is not None):
            raise Reason.FIELD_CONFLICT.error(
                f"this is rank {self._rank} of its trainer; rank 0 passes the fleet, every other rank passes None",
                field="fleet",
            )
        self._fleet = fleet
        self._model = model
        self._bucket_bytes = bucket_bytes
        if path not in _PATHS:
            raise Reason.FIELD_INVALID.error(f"path is {path!r}; it must be one of {', '.join(_PATHS)}", field="path")
        backends = [backend] if isinstance(backend, str) else list(backend)
        if not backends or not set(backends) <= _TRANSPORTS.keys():
            backend_names = ", ".join(_TRANSPORTS)
            raise Reason.FIELD_INVALID.error(f"backend is {backend!r}; it must be of {backend_names}", field="backend")
        if host and network:
            raise Reason.FIELD_CONFLICT.error("host and network exclude each other", field="network")
        self._path = _PATHS[path]
        # An empty list means gloo. The coordinator then also admits engines that report no transports.
        self._transports = [] if backends == ["gloo"] else [_TRANSPORTS[name] for name in dict.fromkeys(backends)]
        self._host = address_on(network, field="network") if network else own_address(host or "127.0.0.1")
        self._trainer = Trainer(name=trainer or f"{socket.gethostname()}:{os.getpid()}", incarnation=incarnation)
        self._trainer_group = trainer_group
        self._size = 1 if trainer_group is None else dist.get_world_size(trainer_group)
        self._part = Part(self._host, 0 if source is None and self._rank == 0 else source, alone=self._size == 1)
        self._members: Members | None = None
        self._leading: Leading | None = None
        self._lead: Lead | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._invitation: str | None = None
        self._unjoined: deque[tuple[str, ErrorDetail]] = deque(maxlen=MISSED)
        """Versions and errors of this rank's updates that ended before the connection to the lead."""
        self._state: UpdateState | None = None
        self._pending: AsyncPending | None = None
        if fleet is not None:
            fleet.publishes(self)

    @traced
    async def update(
        self,
        weights: Weights,
        *,
        version: str,
        checkpoint: str = "",
        adapter: str = "",
        adapter_config: Mapping[str, Any] | None = None,
        adapters: str = "",
        pause: str | None = None,
        abort_all_requests: bool = False,
        flush: bool | None = None,
        after: str = "resume",
        verify: str = "",
        digest: str = "",
        probe: Probe | None = None,
        decode_check: bool | None = None,
        quorum: int = 0,
        retries: int = 0,
        partial: bool = False,
        finite: bool = True,
        base: str = "",
        selector: str = "",
        apply: str = "in_place",
        rollout: RolloutStrategy | None = None,
        deadline_s: float = DEADLINE_S,
        stream: torch.cuda.Stream | None = None,
        progress: OnProgress | bool | None = None,
        state: UpdateState | None = None,
    ) -> UpdateResult:
        """Make ``weights`` the version that the fleet serves.

        On return the source tensors may be overwritten. Settings count at rank 0; ``deadline_s`` and ``stream`` count
        at every rank.

        Args:
            weights: a module, an iterable of (checkpoint name, full tensor), or a WeightSource.
            version: label of the version, or of the adapter's version.
            checkpoint: directory that the engines read instead, with the path as the engines see it. ``weights`` then
                only give the expected content.
            adapter: name of the LoRA adapter that ``weights`` contain, under PEFT's names. Base weights and base
                version stay.
            adapter_config: PEFT config of the adapter (r, lora_alpha, target_modules, ...).
            adapters: keep or drop loaded adapters when the base weights change; "" keeps.
            pause: abort, retract, in_place, drain, or "" to refuse while requests are active. With ``adapter``, only
                requests with the adapter count. None: retract, for an adapter in_place, so that all other requests lose
                nothing.
            flush: None empties the caches; False keeps KV entries of the old weights.
            after: resume or stay_paused.
            verify: level of verification of the bytes at the ranks: expected, replica, received or none; "" for the
                highest level that each target reaches; probe for the probe alone.
            digest: prefer_keyed, keyed or sha256 (docs/digests.md). "" means prefer_keyed on a host with a GPU or a CPU
                with int8 instructions, else sha256. prefer_keyed is keyed if every stage of the model computes keyed
                digests, else sha256. Adapters and checkpoints are digested by SHA-256.
            probe: log probabilities of the new weights. Every target must reproduce the log probabilities before
                serving, at every level of ``verify``.
            decode_check: every target compares decode with prefill before serving (docs/decode-check.md). None: each
                target that can, if the check costs less than a tenth of the update.
            quorum: number of targets that must confirm, 0 for all.
            retries: number of further attempts after a group failed, without the lost targets. The sources iterate over
                their weights again.
            partial: only some of the parameters are sent.
            finite: refuse weights with NaN or infinite values, by name, before any pause. Every trainer rank checks
                local values, or all iterate over the weights once more if a source has no ``local``.
            base: label of the version that this publisher sent last and that every target has. Only tensors that differ
                from the base are sent, after a pass that digests all tensors.
            selector: target, draft or all, for engines with a draft model; "" for all.
            apply: in_place, under the pause; or staged, into a shadow copy during generation, with a pause for the swap
                only.
            rollout: None brings all targets to the version at once, :func:`rolling` batch by batch. A staged batch
                swaps shadow copies. A batch in place takes a further pass, in which the sources must give the same
                tensors again.
            stream: weights on a GPU are read after the work queued on this stream before the call. None: the caller's
                current stream.
            progress: a function that is called with an :class:`~rlctl.trainer.update_progress.UpdateProgress` at each
                change, at most four times a second, and once more when the version is served. The calls are made one
                after another in a thread of their own, at rank 0 only. While a call runs, newer reports replace each
                other; the update waits for no call, except up to 2 s at its end. No call begins after the return. The
                first exception of the function is logged, and does not disturb the update. True: a line with a bar at
                stderr, if stderr is a terminal.
            state: used by :meth:`update_async`; omit.

        Raises OperationFailed, with the operation, if the update ended without a version. Raises a different RlctlError
        if the update was refused or a source failed. Every trainer rank raises the error. The version is then not
        served, with three exceptions. If a source failed after the first batch of a rolling update in place, that batch
        serves the version. The operation then ended PARTIAL. An error with the outcome UNKNOWN arose during the commit:
        the version may be served. VERIFICATION_UNREACHABLE after a required ``decode_check``: an old coordinator has
        published the version without the check.

        Raises UPDATE_IN_PROGRESS while an earlier update of this publisher has not ended.
        """
        started = time.perf_counter()
        if state is None:
            state = self._next(stream)
        timeout = duration(deadline_s)  # raises for an invalid time before anything begins
        if not isinstance(version, str):  # for example the number of a step
            raise Reason.FIELD_INVALID.error(f"version is {version!r}; it must be a text", field="version")
        refuse_unusable(progress)
        if checkpoint and digest not in ("", "sha256", "prefer_keyed"):
            raise Reason.FIELD_CONFLICT.error("a checkpoint is digested by SHA-256", field="digest")
        limit = asyncio.timeout(deadline_s + GRACE_S)
        self._state = state
        state.begun = True
        try:
            async with (
                reporting(self._fleet, progress, state, model=self._model, version=version) as report_end,
                limit,
            ):
                await self._meet(version)
                if self._lead is not None:
                    with self._lead.update(version) as number:
                        source = await self._part.read(weights, state)
                        operation, totals = await follow(self._lead, self._part, source, version, number, state)
                else:
                    assert self._leading is not None
                    assert self._members is not None
                    with self._members.update(version, state):
                        source = await self._part.read(weights, state)
                        request = BeginWeightUpdateRequest(
                            header=RequestHeader(timeout=timeout),
                            model=self._model,
                            version=version,
                            path=self._path,
                            transports=self._transports,
                            kind=_kind(adapter, adapter_config, partial=partial, base=base, checkpoint=checkpoint),
                            base=WeightVersion(label=base) if base else None,
                            adapter=adapter,
                            adapter_config=_adapter_config(source, adapter, adapter_config),
                            options=verbs_pb2.UpdateOptions(
                                pause=_number(common_pb2.PauseMode, _pause(pause, adapter), "pause"),
                                abort_all_requests=abort_all_requests,
                                flush_cache=flush,
                                after=_number(verbs_pb2.AfterUpdate, after, "after"),
                                verify=_number(common_pb2.VerificationLevel, verify, "verify"),
                                digest=_digest_function(digest, tensors=not (adapter or checkpoint)),
                                quorum=quorum,
                                probe=None if probe is None else probe.to_proto(),
                                decode_check=decode_check,
                                adapters=_number(verbs_pb2.AdapterPolicy, adapters, "adapters"),
                                selector=_number(common_pb2.WeightSelector, selector, "selector"),
                            ),
                            apply=_number(verbs_pb2.ApplyMode, apply, "apply"),
                            rollout=rollout,
                            lease_ttl=duration(LEASE_TTL_S),
                            renew_interval=duration(RENEW_S),
                            retries=retries,
                        )
                        operation, totals = await self._leading.run(
                            source, request, state, checkpoint=checkpoint, finite_only=finite, deadline_s=deadline_s
                        )
                        report_end(operation)
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the source
            operation, totals = _in_the_end(state, deadline_s), Sent()
        finally:
            try:
                # The trainer's next collectives must not overlap the collectives of a running pass.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(limit.when()):
                        await self._part.settle(STOP_S)
            finally:
                state.ended.set()
        if decode_check and not operation.verification.decode:
            raise Reason.VERIFICATION_UNREACHABLE.error(
                f"{version} is published, but no decode check was made: the coordinator is of an older release",
                field="decode_check",
                next_step="Upgrade the coordinator.",
            )
        result = UpdateResult(
            version=operation.weight_version,
            operation=operation,
            model_digest=operation.model_digest,
            bytes_sent=totals.bytes,
            tensors_sent=totals.tensors,
            transfer_s=seconds(totals.elapsed),
            pause_s=seconds(operation.pause_time),
            total_s=time.perf_counter() - started,
        )
        if self._fleet is not None and result.left_out:
            named = ", ".join(f"{slot} ({cause})" for slot, cause in result.left_out.items())
            what = f"version {version} of adapter {adapter}" if adapter else f"version {version}"
            log.warning("%s was not sent to %s", what, named)
        return result

    def update_async(
        self, weights: Weights, *, version: str, stream: torch.cuda.Stream | None = None, **settings: Any
    ) -> AsyncPending:
        """Start :meth:`update`, with its settings, and return at once. Every rank of the trainer calls this.

        The weights must not change until the pending update's ``wait_sent`` has returned. Unlike with :meth:`update`, a
        mismatch does not name the rank with the wrong part: that takes a further pass through the weights. Raises
        UPDATE_IN_PROGRESS while an earlier update of this publisher has not ended. The waits raise all other errors.
        """
        state = self._next(stream, watched=True)
        update = self.update(weights, version=version, state=state, **settings)
        self._state, self._pending = state, AsyncPending(update, state)
        return self._pending

    def _next(self, stream: torch.cuda.Stream | None, *, watched: bool = False) -> UpdateState:
        """Return the state of a new update. One update at a time: groups and segments are reused."""
        if self._fleet is not None:
            self._fleet.connection.check_loop()
        if self._state is not None and not self._state.ended.is_set():
            raise Reason.UPDATE_IN_PROGRESS.error(
                "this publisher's last update has not ended", next_step="Wait for the update, or cancel it."
            )
        return UpdateState(trainer_stream(stream), watched=watched)

    async def committed(self) -> None:
        """Wait for the end of an update whose commit is under way."""
        if self._state is not None and self._state.decided:
            await self._state.ended.wait()

    async def close(self) -> None:
        """Leave the groups. Engines forget an old group when a new group forms.

        A pending update is cancelled or, during its commit, awaited.
        """
        if self._pending is not None:
            await self._pending.close()
        await stopped(self._meeting)
        self.leave()
        if self._lead is not None:
            await self._lead.close()
        if self._members is not None:
            await self._members.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def leave(self) -> None:
        """Leave the groups and remove the segments, after all updates have ended."""
        self._part.close()

    async def _meet(self, version: str) -> None:
        """Connect the members to the lead, once. The lead's address goes through the trainer's own group.

        The exchange takes every rank and continues after the end of a waiting update, for the next update.
        """
        if self._meeting is None or (self._meeting.done() and (self._lead or self._leading) is None):
            self._meeting = asyncio.create_task(self._met())
        try:
            await asyncio.shield(self._meeting)
        except BaseException as error:
            self._unjoined.append((version, detail(error)))
            raise
        other_ranks = self._lead or self._members
        while other_ranks is not None and self._unjoined:
            other_ranks.fail(*self._unjoined.popleft())

    async def _met(self) -> None:
        if self._invitation is None:  # a further exchange would take the trainer's own collectives
            self._invitation = await self._exchange()
        if self._fleet is None:
            address, token, secure = json.loads(self._invitation)
            self._lead = await Lead.join(self._rank, address, token, load_tls() if secure else None)
            return
        assert self._members is not None
        self._leading = Leading(
            self._fleet,
            self._model,
            self._part,
            self._members,
            host=self._host,
            trainer=self._trainer,
            bucket_bytes=self._bucket_bytes,
        )

    async def _exchange(self) -> str:
        """Return the lead's address and token, from the lead; "" without members. Every rank calls this."""
        invitation = ""
        if self._fleet is not None:
            if self._members is not None:
                await self._members.close()
            self._members = Members(self._size)
            if self._size > 1:
                tls = self._fleet.connection.tls
                invitation = json.dumps((*await self._members.start(self._host, tls), tls is not None))
        if self._trainer_group is None or self._size == 1:
            return invitation
        share = functools.partial(self._share, self._trainer_group, invitation)
        shared, _ = in_thread(share, lambda: None, "rlctl meeting")
        return await shared

    def _share(self, group: dist.ProcessGroup, text: str) -> str:
        """Run in a thread, which does not inherit the caller's current device."""
        assert self._state is not None
        with self._state.ordering.after():
            return share(group, text)


class Publisher(contextlib.AbstractContextManager["Publisher"]):
    """:class:`AsyncPublisher` for blocking code. Close it, or use it as a context manager."""

    def __init__(self, publisher: AsyncPublisher, loop: LoopThread, *, owns_loop: bool = False) -> None:
        self.aio = publisher
        self._loop = loop
        self._owns_loop = owns_loop

    def update(self, weights: Weights, *, version: str, **settings: Any) -> UpdateResult:
        """Make ``weights`` the version that the fleet serves; see :meth:`AsyncPublisher.update`."""
        settings["stream"] = trainer_stream(settings.get("stream"))
        return self._loop.call(self.aio.update(weights, version=version, **settings))

    def update_async(
        self, weights: Weights, *, version: str, stream: torch.cuda.Stream | None = None, **settings: Any
    ) -> Pending:
        """Start an update and return at once; see :meth:`AsyncPublisher.update_async`."""
        pending = self._start(weights, version=version, stream=trainer_stream(stream), **settings)
        return Pending(self._loop.call(pending), self._loop)

    async def _start(self, weights: Weights, **settings: Any) -> AsyncPending:
        return self.aio.update_async(weights, **settings)

    def close(self) -> None:
        """Leave the groups and cancel a pending update; see :meth:`AsyncPublisher.close`.

        May be repeated, and called after the fleet was closed.
        """
        if not self._loop.running:
            self.aio.leave()
            return
        self._loop.call(self.aio.close())
        if self._owns_loop:
            self._loop.stop()

    def __exit__(self, *_: object) -> None:
        self.close()


def rolling(max_unavailable: int = 1) -> RolloutStrategy:
    """Update targets in batches of ``max_unavailable``. Both versions are served until the last batch has switched.

    Raises FIELD_INVALID for less than 1.
    """
    if max_unavailable < 1:
        raise Reason.FIELD_INVALID.error(f"max_unavailable is {max_unavailable}, at least 1", field="max_unavailable")
    return RolloutStrategy(max_unavailable=max_unavailable)


def _in_the_end(state: UpdateState, deadline_s: float) -> Operation:
    """Return the operation of an update past the deadline if the version is served. Raises DEADLINE_EXCEEDED."""
    if state.ended_operation is not None and state.ended_operation.weight_version.sequence:
        return state.ended_operation
    message, next_step = f"the update did not end within {deadline_s:g} s", ""
    if state.outcome == common_pb2.OUTCOME_UNKNOWN:
        message += "; it was being committed, and its version may be served"
        next_step = "`rlctl get operations` tells how it ended."
    raise Reason.DEADLINE_EXCEEDED.error(message, next_step=next_step, outcome=state.outcome) from None


def _kind(
    adapter: str, config: Mapping[str, Any] | None, *, partial: bool, base: str, checkpoint: str
) -> verbs_pb2.UpdateKind.ValueType:
    """Return the kind of an update by the settings. Raises FIELD_CONFLICT for settings that exclude each other."""
    if base and (partial or checkpoint):
        conflicting = "partial" if partial else "checkpoint"
        raise Reason.FIELD_CONFLICT.error(f"base and {conflicting} exclude each other", field="base")
    if partial and checkpoint:
        raise Reason.FIELD_CONFLICT.error("a checkpoint is read as a whole", field="partial")
    if not adapter and config is None:
        kind = verbs_pb2.UPDATE_KIND_PARTIAL if partial else verbs_pb2.UPDATE_KIND_FULL
        return verbs_pb2.UPDATE_KIND_DELTA if base else kind
    if checkpoint or partial or base:
        raise Reason.FIELD_CONFLICT.error(
            "an adapter is sent whole, from tensors",
            field="checkpoint" if checkpoint else "partial" if partial else "base",
            next_step="Load an adapter from disk with load_adapter.",
        )
    return verbs_pb2.UPDATE_KIND_ADAPTER


def _pause(mode: str | None, adapter: str) -> str:
    """Return the requested pause mode; for None, the mode that loses least."""
    return mode if mode is not None else "in_place" if adapter else "retract"


def _adapter_config(
    source: WeightSource, adapter: str, config: Mapping[str, Any] | None
) -> verbs_pb2.AdapterConfig | None:
    """Return the adapter config for the engines, or None for base weights.

    Raises FIELD_REQUIRED, FIELD_INVALID, UNSUPPORTED.
    """
    if not adapter and config is None:
        return None
    if not adapter:
        raise Reason.FIELD_REQUIRED.error("an adapter needs a name", field="adapter")
    if config is None:
        raise Reason.FIELD_REQUIRED.error("adapter_config is required when adapter is set", field="adapter_config")
    dtypes = {meta.dtype for meta in source.metas()}
    if len(dtypes) != 1:
        listing = ", ".join(sorted(map(str, dtypes))) or "none"
        raise Reason.FIELD_INVALID.error(f"an adapter's tensors must have one dtype, not {listing}", field="weights")
    return lora.from_peft(config, field="adapter_config", dtype=dtype_name(dtypes.pop()))


def _digest_function(name: str, *, tensors: bool) -> Any:
    """Return a digest function. ``tensors``: base weights are sent, which may have a keyed digest."""
    preferred = "prefer_keyed" if tensors and outpaces_sha256() else ""
    return _number(verbs_pb2.DigestFunction, name or preferred, "digest")


def _number(enum: Any, name: str, field: str) -> Any:
    return number(enum.DESCRIPTOR, name, field)


__all__ = [
    "AsyncPending",
    "AsyncPublisher",
    "Pending",
    "Publisher",
    "UpdateResult",
    "rolling",
]
