"""The lead's side of an update: from the sources' offers to the coordinator's answer, attempt by attempt.

Trainer rank 0 opens the update at the coordinator and lets every source join a group and send. Rank 0 then commits, and
tells the other trainer ranks the end. A single-process trainer is a lead without members.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from rlctl.client.admin import AsyncAdmin
from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.contract.fingerprints import fingerprints
from rlctl.ports import new_uuid7
from rlctl.trainer.bucket_plan import (
    Offered,
    Published,
    by_members,
    changed,
    combined,
    digests_of,
    fit,
    in_one_order,
    refuse_full,
    shared_devices,
)
from rlctl.trainer.member_streams import Members
from rlctl.trainer.mismatch_report import blame_ranks, parts_in_question
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.source_rank import STOP_S, Ship, SourceRank, cut_off, detail, explained, refuse_unpublished, stopped
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.trainer_pb2 import Attempt, JoinResponse, Sent, Shipped
from rlctl.v1.update_pb2 import (
    DATA_PATH_BROADCAST,
    DATA_PATH_IPC,
    AbortWeightUpdateRequest,
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    CommitBatchRequest,
    CommitBatchResponse,
    CommitWeightUpdateRequest,
    RenewLeaseRequest,
    RetryWeightUpdateRequest,
    Trainer,
)
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.group.rendezvous import GroupStore
from rlctl.weights.shared_memory.sender import SHARES
from rlctl.weights.tensor import buckets, finite
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.finite import local_values
from rlctl.weights.tensor.source import WeightSource, atomic_lists, spares_of
from rlctl.weights.tensor.tensors import TensorMeta, from_proto

ABORT_S = 60.0
"""Longest time for the coordinator to end an aborted update within the deadline, in seconds."""

RENEW_S = 2.0
"""Longest interval of lease renewals, in seconds: after a failed write a coordinator waits 5 s for the owner."""

LATE_S = 5.0
"""Longest time after the deadline, in seconds: a trainer does not wait for a lost coordinator."""

HEAD_START_S = 0.002
"""Seconds between the commands and the pass. The thread of the pass blocks this loop for 5 ms at a time. The command
that prepares the targets takes longer, and is sent first.
"""

LINGERS_S = 1.0
"""Seconds that the store of an interrupted attempt stays open, for ranks on their way there."""


class Store(Protocol):
    """The meeting place of the members of new groups."""

    def address(self, host: str) -> tuple[str, int]:
        """Return the address for the other members, which reach this machine as ``host``."""

    def close(self) -> None:
        """Stop listening; formed groups are unaffected."""


class Leading:
    """Runs the updates of a model in sequence."""

    def __init__(
        self,
        fleet: AsyncAdmin,
        model: str,
        part: SourceRank,
        members: Members,
        *,
        host: str,
        trainer: Trainer,
        bucket_bytes: int,
        new_store: Callable[[str], Store] = GroupStore,
        new_id: Callable[[], str] = new_uuid7,
    ) -> None:
        """``part``: this process in the attempts; ``host``: address of the store of new groups.

        ``new_store`` opens a store on a host, ``new_id`` draws ids of processes and requests: a simulation replaces
        both.
        """
        self._fleet = fleet
        self._model = model
        self._part = part
        self._members = members
        self._host = host
        self._trainer = trainer
        self._bucket_bytes = bucket_bytes
        self._new_store = new_store
        self._new_id = new_id
        self._state = UpdateState()
        self._going_on = False
        self._local = True
        self._finite = True
        self._passes = 0
        self._reference: tuple[str, list[TensorMeta]] = ("", [])
        self._ordered: tuple[tuple[list[Offered], list[list[str]]], list[verbs_pb2.TensorBucket]] = (([], []), [])
        self._sent = Published()
        self._renew_identity()

    async def run(
        self,
        source: WeightSource,
        request: BeginWeightUpdateRequest,
        state: UpdateState,
        *,
        checkpoint: str,
        finite_only: bool,
        deadline_s: float,
    ) -> tuple[Operation, Sent]:
        """Run an update from the offers to the end, inside of :meth:`Members.update`, and tell the members the end.

        ``finite_only``: refuse weights with values that are not finite.
        """
        self._state, self._passes = state, 0
        self._going_on = state.watched
        self._finite = finite_only
        request.trainer.CopyFrom(self._trainer)
        deadline = asyncio.get_running_loop().time() + deadline_s
        try:
            offers = await self._offers(source)
            if checkpoint:
                operation, totals = await self._from_disk(source, offers, request, checkpoint, deadline)
            else:
                operation, totals = await self._broadcast(source, offers, request, deadline)
        except BaseException as error:
            # Our groups may be gone: the next update must not reuse any.
            self._renew_identity()
            if isinstance(error, RlctlError):
                error.outcome = state.outcome
            raise
        self._members.end(JoinResponse(ended=operation))
        return operation, totals

    async def _offers(self, source: WeightSource) -> list[Offered]:
        """Return the offer of each source, once every trainer rank has joined the update."""
        offers: dict[int, Offered] = {}
        self._local = local_values(source) is not None
        if self._part.source is not None:
            offers[self._part.source] = Offered(
                source.metas(), atomic_lists(source), self._part.host_id, self._part.room, spares_of(source)
            )
        for offer in (await self._members.offers()).values():
            self._going_on |= offer.goes_on
            self._local &= offer.local
            if offer.HasField("source"):
                if offer.source in offers:
                    raise Reason.FIELD_CONFLICT.error(f"two trainer ranks are source {offer.source}", field="source")
                offers[offer.source] = Offered.of(offer)
        if sorted(offers) != list(range(len(offers))) or not offers:
            raise Reason.FIELD_INVALID.error(
                f"the sources are {sorted(offers)}; sources are numbered from 0", field="source"
            )
        return [offers[index] for index in range(len(offers))]

    async def _from_disk(
        self,
        source: WeightSource,
        offers: list[Offered],
        request: BeginWeightUpdateRequest,
        checkpoint: str,
        deadline: float,
    ) -> tuple[Operation, Sent]:
        """Update from a checkpoint. The sources only digest the tensors that the checkpoint must contain."""
        wire = fit(self._model, offers, await self._ask_reference(), partial=False)
        metas = [meta for offered in wire for meta in offered.metas]
        digests = await self._digest(source, metas, last=True)
        self._state.decided = True
        self._state.update_id = self._new_id()
        try:
            operation = await self._fleet.update_weights_from_disk(
                checkpoint,
                version=request.version,
                options=request.options,
                expected_digest=combined(digests),
                apply=request.apply,
                max_unavailable=request.rollout.max_unavailable,
                model=self._model,
                timeout_s=deadline - asyncio.get_running_loop().time(),
                request_id=self._state.update_id,
            )
        except OperationFailed as error:
            self._state.ended_operation = operation = error.operation
            refuse_unpublished(operation)
        except RlctlError as error:
            self._state.decided = error.outcome == common_pb2.OUTCOME_UNKNOWN
            raise
        self._sent = Published(operation.weight_version, digests)
        return operation, Sent()

    async def _digest(
        self, source: WeightSource, metas: Sequence[TensorMeta], *, last: bool, key: bytes = b""
    ) -> dict[str, str]:
        """Digest the weights in the dtypes of ``metas``, in a pass of the sources, and send nothing.

        ``last``: no further pass follows. Raises WEIGHTS_NOT_FINITE.
        """
        listed = [buckets.to_proto(Bucket(0, list(metas), True))]
        attempt = Attempt(number=self._next_pass(), buckets=listed, last=last, finite=self._finite, digest_key=key)
        return digests_of(_all_finite(await self._take_turns(source, attempt, _nothing_to_ship), metas), key)

    async def _refuse_not_finite(self, source: WeightSource, metas: Sequence[TensorMeta]) -> None:
        """Raise WEIGHTS_NOT_FINITE for values that are not finite.

        The trainer's ranks check local values. If a rank gets weights only by gathering, the sources make a pass.
        """
        attempt = Attempt(
            number=self._next_pass(),
            buckets=[buckets.to_proto(Bucket(0, list(metas), True))],
            without_digests=True,
            finite=True,
            local=self._local,
        )
        _all_finite(await self._take_turns(source, attempt, _nothing_to_ship), metas)

    def _next_pass(self) -> int:
        self._passes += 1
        return self._passes

    async def _broadcast(
        self,
        source: WeightSource,
        offers: list[Offered],
        request: BeginWeightUpdateRequest,
        deadline: float,
    ) -> tuple[Operation, Sent]:
        request.num_sources = len(offers)
        hosts = {offered.host_id for offered in offers}
        if request.path == DATA_PATH_IPC:
            refuse_full(offers)
        # Broadcasting is better than segments that fill up shared memory needed elsewhere.
        fits = request.path == DATA_PATH_IPC or all(offered.fits(SHARES * len(offers)) for offered in offers)
        if request.path != DATA_PATH_BROADCAST and len(hosts) == 1 and fits:
            request.host_ids.extend(hosts)
        partial = request.kind == verbs_pb2.UPDATE_KIND_PARTIAL
        if request.kind == verbs_pb2.UPDATE_KIND_DELTA:
            self._sent.refuse_as_base(request.base.label)
            request.base.CopyFrom(self._sent.version)
        plan = await self._begin(request, deadline)
        self._state.follow(plan)
        digests: dict[str, str] = {}
        results = [Sent()]
        try:
            async with self._renewing(plan):
                if request.options.digest == verbs_pb2.DIGEST_FUNCTION_KEYED and not plan.digest_key:
                    raise Reason.UNSUPPORTED.error("the coordinator's release has no keyed digests", field="digest")
                reference = [] if request.adapter else await self._get_reference(plan)
                wire = fit(self._model, offers, reference, partial)
                metas = [meta for offered in wire for meta in offered.metas]
                if request.kind == verbs_pb2.UPDATE_KIND_DELTA:
                    digests = await self._digest(source, metas, last=False, key=plan.digest_key)
                    wire = changed(wire, self._sent.digests, digests)
                elif self._finite:
                    await self._refuse_not_finite(source, metas)
                while True:  # once, or once per batch of a rolling update in place
                    plan, results = await self._deliver(source, wire, plan, request, deadline)
                    pass_digests = digests_of(results, plan.digest_key)
                    digests |= pass_digests
                    fields: dict[str, Any] = {
                        "update_id": plan.update_id,
                        "fencing_token": plan.fencing_token,
                        "expected_digest": "" if partial else combined(digests, plan.digest_key),
                        "sent_digest": combined(pass_digests, plan.digest_key),
                        "fingerprints": b"" if partial else fingerprints(digests),
                    }
                    if not _more_batches(plan):
                        self._say_delivered()
                        operation = await self._commit(CommitWeightUpdateRequest(**fields), deadline)
                        break
                    answer = await self._commit_batch(CommitBatchRequest(batch=plan.batch.number, **fields), deadline)
                    if answer.HasField("ended"):
                        operation = answer.ended
                        break
                    plan = answer.next
                await self._name_ranks(source, wire, operation, digests, plan.digest_key, deadline)
                refuse_unpublished(operation)
                self._note(request, operation, digests)
                return operation, results[0]
        except BaseException as error:
            cause = error if isinstance(error, RlctlError) else None
            reason = cause.message if cause else f"{type(error).__name__}: {error}"
            ended = await asyncio.shield(asyncio.create_task(self._abort(plan, reason, deadline, cause)))
            own = error.operation if isinstance(error, OperationFailed) else None
            is_own = own is not None and own.operation_id == plan.update_id
            self._state.ended_operation = own if ended is None and is_own else ended
            if ended is not None and ended.state == OPERATION_STATE_OK:
                # The commit was under way: the coordinator has completed the update, and only the answer is missing.
                self._note(request, ended, digests)
                if isinstance(error, Exception):
                    return ended, results[0]
            if ended is not None and _failed_at_the_fleet(error):
                if ended.weight_version.sequence:
                    # A rolling update in place: earlier batches serve the version.
                    self._renew_identity()
                    return ended, Sent()
                if not is_own and reason not in ended.error.message:
                    # The lease, an operator or a different trainer ended the update, and that cut our sends.
                    refuse_unpublished(ended)
            raise

    def _note(self, request: BeginWeightUpdateRequest, operation: Operation, digests: dict[str, str]) -> None:
        """Record the digests of the version as base of a delta. An adapter update leaves the base weights unchanged."""
        if request.kind != verbs_pb2.UPDATE_KIND_ADAPTER:
            partial = request.kind == verbs_pb2.UPDATE_KIND_PARTIAL
            self._sent = Published(operation.weight_version, {} if partial else digests)

    async def _begin(self, request: BeginWeightUpdateRequest, deadline: float) -> BeginWeightUpdateResponse:
        """Open the update. If cancelled before the plan arrives, repeat the call to find and abort the open update."""

        async def take_back() -> None:
            with contextlib.suppress(RlctlError):
                opened = await self._fleet.connection.call("BeginWeightUpdate", request, LATE_S)
                await self._abort(opened, "the update was cancelled during its begin", deadline)

        try:
            plan: BeginWeightUpdateResponse = await self._fleet.connection.call("BeginWeightUpdate", request, 30.0)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.create_task(take_back()))
            raise
        return plan

    async def _deliver(
        self,
        source: WeightSource,
        wire: list[Offered],
        plan: BeginWeightUpdateResponse,
        request: BeginWeightUpdateRequest,
        deadline: float,
    ) -> tuple[BeginWeightUpdateResponse, list[Sent]]:
        """Send, and repeat without lost targets up to ``retries`` times.

        Returns the plan of the successful attempt and the parts that the sources sent.
        """
        while True:
            try:
                return plan, await self._send(source, wire, plan, request, deadline)
            except RlctlError as error:
                if not _worth_retrying(error):
                    raise
                if plan.attempt > request.retries:
                    if request.options.quorum and not request.retries:
                        error.next_step = "A quorum goes on without stages that are lost in another attempt: retries=1."
                    raise
                retry = RetryWeightUpdateRequest(
                    update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=plan.attempt
                )
                plan = await self._fleet.connection.call("RetryWeightUpdate", retry, 30.0)

    async def _send(
        self,
        source: WeightSource,
        wire: list[Offered],
        plan: BeginWeightUpdateResponse,
        request: BeginWeightUpdateRequest,
        deadline: float,
    ) -> list[Sent]:
        """Run an attempt: form the groups, let every source send and every target rank receive."""
        self._state.follow(plan)
        if not any(offered.metas for offered in wire):
            return [Sent()]
        store = None if all(group.formed for group in plan.groups) else self._new_store(self._host)
        host, port = ("", 0) if store is None else store.address(self._host)
        attempt = Attempt(
            number=self._next_pass(),
            groups=plan.groups,
            store_address=host,
            store_port=port,
            buckets=self._in_one_order(wire, by_members(plan)),
            shared_devices=sorted(shared_devices(plan)),
            without_digests=request.options.verify == common_pb2.VERIFICATION_LEVEL_NONE,
            digest_key=plan.digest_key,
            timeout=duration(deadline - asyncio.get_running_loop().time()),
            last=plan.attempt > request.retries and not _more_batches(plan),
            published=plan.batch.published,
        )
        fleet = asyncio.create_task(self._drive(plan, attempt, deadline))

        async def ship(segments: Sequence[TensorSegment]) -> None:
            take = verbs_pb2.UpdateWeightsFromTensorRequest(segments=segments)
            take.header.fence.update_id = plan.update_id
            await self._fleet.call(take, timeout_s=deadline - asyncio.get_running_loop().time())

        try:
            if plan.groups:
                await asyncio.sleep(HEAD_START_S)
            results = await self._take_turns(source, attempt, ship, fleet)
        except BaseException:
            if store is not None:
                # SGLang's ranks retry a lost store until declared stuck. A store that answers first and closes later
                # ends the wait.
                asyncio.get_running_loop().call_later(LINGERS_S, store.close)
            raise
        finally:
            fleet.cancel()
        if store is not None:
            store.close()
        return results

    def _say_delivered(self) -> None:
        """Tell all ranks that no further attempt needs the weights."""
        self._state.sent.set()
        self._members.tell(JoinResponse(delivered=True))

    def _in_one_order(self, wire: list[Offered], names: list[list[str]]) -> list[verbs_pb2.TensorBucket]:
        """Return the buckets of all sources. Buckets for the same members are consecutive.

        Reuses the buckets of the last update if nothing changed.
        """
        if self._ordered[0] != (wire, names):
            ordered = [bucket for group in names or [[]] for bucket in in_one_order(wire, group, self._bucket_bytes)]
            self._ordered = ((wire, names), ordered)
        return self._ordered[1]

    async def _drive(self, plan: BeginWeightUpdateResponse, attempt: Attempt, deadline: float) -> None:
        """Send the coordinator the commands of an attempt: form the groups in order, then receive the buckets."""
        loop = asyncio.get_running_loop()
        for group in plan.groups:
            if group.formed:
                continue
            join = verbs_pb2.InitWeightsUpdateGroupRequest(
                master_address=attempt.store_address,
                master_port=attempt.store_port,
                world_size=group.world_size,
                group_name=group.group_name,
                backend=group.backend,
            )
            join.header.fence.update_id = plan.update_id
            await self._fleet.call(join, timeout_s=deadline - loop.time())
        receiving = []
        for names in by_members(plan):
            member_buckets = [bucket for bucket in attempt.buckets if bucket.group_name in names]
            receive = verbs_pb2.UpdateWeightsFromDistributedRequest(buckets=member_buckets)
            receive.header.fence.update_id = plan.update_id
            call = self._fleet.call(receive, timeout_s=deadline - loop.time())
            receiving.append(asyncio.create_task(call))
        try:
            await asyncio.gather(*receiving)
        finally:
            await stopped(*receiving)

    async def _take_turns(
        self, source: WeightSource, attempt: Attempt, ship: Ship, fleet: asyncio.Task[None] | None = None
    ) -> list[Sent]:
        """Run the attempt at every trainer rank and return the results, the lead's first.

        The first failure ends the attempt at all ranks.
        """
        self._members.tell(JoinResponse(attempt=attempt))
        own_attempt = asyncio.create_task(self._part.attempt(source, attempt, ship, self._state))
        shipping = asyncio.create_task(self._forward(attempt.number, ship))
        member_results = asyncio.create_task(self._members.sent(attempt.number))
        tasks: list[asyncio.Task[Any]] = [own_attempt, member_results, *([fleet] if fleet is not None else [])]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            causes = [cause for task in tasks if task.done() and (cause := task.exception()) is not None]
            if causes and fleet is not None and all(cut_off(cause) for cause in causes):
                # An interrupted broadcast of ours explains less than the ranks' next answer.
                await asyncio.wait({fleet})
                fleet_error = fleet.exception()
                causes = [fleet_error] if fleet_error is not None else causes
            if causes:
                raise await explained(causes[0], member_results)
        except BaseException as error:
            self._members.tell(JoinResponse(stop=detail(error)))
            await stopped(own_attempt, member_results)
            with contextlib.suppress(TimeoutError, RlctlError):
                async with asyncio.timeout(STOP_S):
                    await self._members.stopped(attempt.number)
            raise
        finally:
            await stopped(shipping)
        return [own_attempt.result(), *(result for _, result in sorted(member_results.result().items()))]

    async def _forward(self, attempt: int, ship: Ship) -> None:
        """Forward the shipments of members to the ranks in this attempt, in sequence."""
        while True:
            request = await self._members.shipments.get()
            if not self._members.waits(request, attempt):
                continue
            answer = Shipped()
            try:
                await ship(request.shipment.segments)
            except RlctlError as error:
                answer.error.CopyFrom(error.detail())
            self._members.answer(request.rank, JoinResponse(shipped=answer))

    async def _get_reference(self, plan: BeginWeightUpdateResponse) -> list[TensorMeta]:
        """Return the reference of the model. Ask again if a target changed: the reference may differ."""
        key = " ".join(f"{target.slot}/{target.incarnation}" for target in plan.targets)
        if self._reference[0] != key:
            self._reference = (key, await self._ask_reference(plan.targets[0].slot))
        return self._reference[1]

    async def _ask_reference(self, *slots: str) -> list[TensorMeta]:
        request = verbs_pb2.GetModelInfoRequest(reference=True)
        answer = await self._fleet.call(request, model=self._model, slots=slots)
        listed = answer.stage_results[0].rank_results[0].model_info.reference
        return [from_proto(info) for info in listed]

    async def _commit_batch(self, request: CommitBatchRequest, deadline: float) -> CommitBatchResponse:
        remaining = deadline - asyncio.get_running_loop().time()
        self._state.decided = True
        answer: CommitBatchResponse = await self._fleet.connection.call("CommitBatch", request, remaining)
        return answer

    async def _commit(self, request: CommitWeightUpdateRequest, deadline: float) -> Operation:
        remaining = deadline - asyncio.get_running_loop().time()
        self._state.decided = True
        operation: Operation = await self._fleet.connection.call("CommitWeightUpdate", request, remaining)
        return operation

    async def _name_ranks(
        self,
        source: WeightSource,
        wire: list[Offered],
        operation: Operation,
        digests: Mapping[str, str],
        key: bytes,
        deadline: float,
    ) -> None:
        """Name the ranks with a wrong part of a tensor, by digests of the sources over the same parts.

        The digests take a further pass through the weights. If a trainer rank may overwrite its weights after the send,
        there is no such pass, and the results name only the suspected ranks.
        """
        parts = parts_in_question(operation)
        remaining = deadline - asyncio.get_running_loop().time()
        if not parts or remaining <= 0 or self._going_on:
            return
        names = {part.name for part in parts}
        metas = [meta for offered in wire for meta in offered.metas if meta.name in names]
        attempt = Attempt(
            number=self._next_pass(),
            buckets=[buckets.to_proto(Bucket(0, metas, True))],
            parts=parts,
            digest_key=key,
            timeout=duration(remaining),
        )
        # A failure to find the ranks does not change the result of the update.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(remaining):
                blame_ranks(operation, digests, await self._take_turns(source, attempt, _nothing_to_ship))

    async def _abort(
        self, plan: BeginWeightUpdateResponse, reason: str, deadline: float, cause: RlctlError | None = None
    ) -> Operation | None:
        """Abort the update and return the operation, or None without an answer of the coordinator."""
        request = AbortWeightUpdateRequest(
            update_id=plan.update_id,
            fencing_token=plan.fencing_token,
            reason=reason,
            error=cause.detail() if cause else None,
        )
        timeout_s = min(max(deadline - asyncio.get_running_loop().time(), LATE_S), ABORT_S)
        # Best effort: without renewals, the lease ends the update.
        with contextlib.suppress(RlctlError):
            operation: Operation = await self._fleet.connection.call("AbortWeightUpdate", request, timeout_s)
            return operation
        return None

    @contextlib.asynccontextmanager
    async def _renewing(self, plan: BeginWeightUpdateResponse) -> AsyncIterator[None]:
        request = RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
        interval_s = min(seconds(plan.lease_ttl) / 3, RENEW_S)

        async def renew() -> None:
            while True:
                await asyncio.sleep(interval_s)
                with contextlib.suppress(RlctlError):
                    await self._fleet.connection.call("RenewLease", request, interval_s)

        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()

    def _renew_identity(self) -> None:
        """Draw a new boot id, so that the coordinator reuses no group. Groups are kept under an unchanged boot id."""
        self._trainer.boot_id = self._new_id()


def _worth_retrying(error: RlctlError) -> bool:
    """Return whether a group or an engine failed, and not a source or the request."""
    if isinstance(error, OperationFailed) and error.operation.stage_results:
        lost = (common_pb2.OUTCOME_DIRTY, common_pb2.OUTCOME_UNKNOWN, common_pb2.OUTCOME_NOT_SENT)
        # A stage that has noticed the loss of a rank rejects the pause or the write with RANK_LOST, and a stage that
        # has not noticed the end of its server with UNREACHABLE. To a join, UNREACHABLE may also mean our store.
        reasons = {Reason.RANK_LOST.name}
        if error.operation.verb != "InitWeightsUpdateGroup":
            reasons.add(Reason.UNREACHABLE.name)
        return any(result.outcome in lost or result.error.reason in reasons for result in error.operation.stage_results)
    return error.reason is Reason.GROUP_FAILED  # also the reason of a write refused after the failure of a group


def _failed_at_the_fleet(error: BaseException) -> bool:
    """Whether targets failed or too few remain, and not a source."""
    reasons = (Reason.GROUP_FAILED, Reason.QUORUM_NOT_MET, Reason.NO_TARGETS, Reason.UPDATE_NOT_FOUND)
    return isinstance(error, OperationFailed) or (isinstance(error, RlctlError) and error.reason in reasons)


def _more_batches(plan: BeginWeightUpdateResponse) -> bool:
    """Whether the sources must make a further pass for the next batch of targets."""
    return bool(plan.batch.number) and not plan.batch.last


def _all_finite(sent: list[Sent], metas: Sequence[TensorMeta]) -> list[Sent]:
    """Return the results if all values are finite. Raises WEIGHTS_NOT_FINITE."""
    names = {name for result in sent for name in result.not_finite}
    if names:
        raise finite.refusal(names, len(metas))
    return sent


async def _nothing_to_ship(segments: Sequence[TensorSegment]) -> None:
    raise Reason.INTERNAL.error(f"{len(segments)} segments were written without a target")
