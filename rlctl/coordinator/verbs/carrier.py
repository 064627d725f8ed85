"""Carries out verbs, each by its route: accepts the request once, and answers with the operation."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason
from rlctl.contract.quotas import counted, excess_reads
from rlctl.contract.scopes import calling
from rlctl.contract.verbs import Verb, of_request
from rlctl.coordinator.fleet.capabilities import incapable_all
from rlctl.coordinator.fleet.slot import Slot, names
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.verbs.routes import Call, Parts, is_implicit, route_of
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, ExcludedStage, Operation

REPLY_S = 0.5
"""Seconds of a call's deadline, at most a tenth, kept so that the answer arrives before the caller disconnects."""


class Carrier:
    """Carries out the verbs of the table."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._roster = parts.context.roster
        self._clock = parts.context.clock
        self._operations = parts.context.operations
        self._updates = parts.updates
        self._implicit = parts.implicit
        self._reads: Counter[str] = Counter()
        """Reads of stages under way, by principal."""

    async def carry_out(self, request: Any, remaining_s: float | None) -> Operation:
        """Carry out a valid request. ``remaining_s``: time until the caller's deadline."""
        verb, route = of_request(request), route_of(request)
        timeout_s = _timeout(request.header, verb.deadline_s, remaining_s)
        wait = not getattr(request, "is_async", False)
        if is_implicit(request):
            start = functools.partial(self._start, verb, request, timeout_s)
            return await self._implicit.answer(await self._implicit.run(request, timeout_s, start), wait=wait)
        if route.opens is None and (request.header.validate_only or not verb.mutates(request)):
            return await self._ask(verb, request, timeout_s)
        existing = self._known(request)
        if route.opens is not None:
            run = await route.opens(self._parts.disk, request, timeout_s)
        else:
            if existing is None and not request.header.fence.update_id:
                await self._go_first(verb, request, timeout_s)
                existing = self._known(request)  # repeat of a faster call
            run = existing or await self._submit(verb, request, timeout_s)
        return await run.answer(replayed=existing is not None, wait=wait)

    async def _start(self, verb: Verb, request: Any, timeout_s: float) -> Run:
        """Accept a new request without an update id."""
        opens = route_of(request).opens
        if opens is not None:
            return await opens(self._parts.disk, request, timeout_s)
        await self._go_first(verb, request, timeout_s)
        return await self._submit(verb, request, timeout_s)

    def _known(self, request: Any) -> Run | None:
        return self._operations.known(request.header.request_id, request)

    async def _ask(self, verb: Verb, request: Any, timeout_s: float) -> Operation:
        """Carry out a read, without a record or a wait for writes. Or validate a write (``validate_only``)."""
        header: RequestHeader = request.header
        targets, excluded = self._targets(verb, request)
        operation = Operation(
            header=self._roster.header(),
            operation_id=header.request_id or self._clock.new_id(),
            verb=verb.name,
            targets=names(targets),
            excluded=excluded,
            model=header.target.model,
            create_time=self._clock.wall(),
        )
        if header.validate_only:
            self._updates.refuse_outsider(targets, header.fence.update_id)
            operation.validate_only = True
            operation.state = OPERATION_STATE_OK
            return operation
        run = Run(OperationRecord(operation=operation))
        run.begun_at = self._clock.now()
        with self._reading():
            await self._parts.context.fanout.step(request, targets, run, self._clock.now() + timeout_s)
        run.conclude()
        run.operation.done_time.CopyFrom(run.time_at(self._clock.now()))
        return run.operation

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Count a read of the caller within the block. Raises QUOTA_EXCEEDED."""
        identity = calling.get()
        if identity is None:
            yield
            return
        refusal = excess_reads(identity.principal, self._reads[identity.principal.name])
        if refusal is not None:
            raise refusal
        with counted(self._reads, identity.principal.name):
            yield

    async def _go_first(self, verb: Verb, request: Any, timeout_s: float) -> None:
        """End implicit updates and heals that a request without an update id ends, or would wait for."""
        route, targets = route_of(request), self._targets(verb, request)[0]
        if not (route.joins_update and self._implicit.flushed_in(targets)):
            self._operations.refuse_excess(verb.name)
        if route.settles:
            await self._implicit.settle(targets)
        if verb.waits:
            await self._updates.go_first(verb.name, targets, timeout_s)

    async def _submit(self, verb: Verb, request: Any, timeout_s: float) -> Run:
        route, update_id = route_of(request), request.header.fence.update_id
        targets, excluded = self._targets(verb, request)
        joined = self._implicit.flushed_in(targets) if route.joins_update and not update_id else ""
        if verb.waits and not joined:
            self._updates.refuse_outsider(targets, update_id)
        if route.leaves_groups:
            for model in {slot.model for slot in targets}:
                self._implicit.joining.forget(model)
        if route.absent:
            for stage in excluded:
                stage.reason = route.absent
        attempt = self._updates.attempt(update_id)  # a next attempt may be planned before the operation is on record
        command = request
        if joined:
            command = type(request).FromString(request.SerializeToString())
            command.header.fence.update_id = joined

        async def work(run: Run) -> None:
            if not route.despite_cancel:
                run.refuse_given_up()
            call = Call(command, targets, run, timeout_s, self._clock.now() + timeout_s, attempt)
            async with self._roster.leaving(targets if route.ends_serving(request) else ()):
                await (route.work if update_id else route.by_name or route.work)(self._parts, call)

        return await self._operations.start(
            request,
            verb=verb.name,
            targets=targets,
            excluded=excluded,
            work=work,
            exclusive=verb.waits and not (update_id or joined),
            model=request.header.target.model,
            update_id=update_id,
            step=bool(joined),
        )

    def _targets(self, verb: Verb, request: Any) -> tuple[list[Slot], list[ExcludedStage]]:
        header, route = request.header, route_of(request)
        if header.fence.update_id:
            targets, excluded = self._updates.targets(header.fence.update_id, request), list[ExcludedStage]()
        elif verb.in_update and not header.validate_only:
            raise Reason.FIELD_REQUIRED.error(
                f"{verb.name} belongs to an update", field="header.fence.update_id", next_step="Begin an update first."
            )
        else:
            targets, excluded = route.selects(self._parts, request)
        route.refuses(self._parts, request, targets)
        missing = incapable_all(targets, request)
        if missing is not None:
            raise Reason.UNSUPPORTED_BY_ALL.error(
                f"none of {len(targets)} stages can do {verb.name}: {missing.message}", field=missing.field
            )
        return targets, excluded


def _timeout(header: RequestHeader, default_s: float, remaining_s: float | None) -> float:
    timeout_s = seconds(header.timeout) if header.HasField("timeout") else default_s
    if remaining_s is not None:
        timeout_s = min(timeout_s, remaining_s - min(REPLY_S, remaining_s / 10))
    if timeout_s <= 0:
        raise Reason.DEADLINE_EXCEEDED.error("the time was up when the request arrived")
    return timeout_s
