"""Sends requests to stages without a proxy: waits for a routable stage, and records failures of stages."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Self

from rlctl.client.connection import Connection
from rlctl.client.fleet_watch import FleetView
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.partial_responses import Merged
from rlctl.rollout import prefill_decode
from rlctl.rollout.picking.router import REFUSALS, Picked, Router, Wanted, next_step, obstacles
from rlctl.rollout.stage_stream import LEFT_S, Answers, Line, Metadata, Parts
from rlctl.transport.channel import Credentials, bearer
from rlctl.v1.coordinator_pb2 import GetFleetRequest
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse

log = logging.getLogger(__name__)

TELL_S = 1.0
"""Seconds without a routable stage until the wait is logged."""

WARN_S = 10.0
"""Seconds until the wait is logged as a warning.

Longer than most pauses. A script without logging set up shows warnings too.
"""

MOST_NAMED = 8
"""Largest number of stages in the text of an error."""


class Lines:
    """The view of a fleet and the lines to its stages, shared by all callers."""

    def __init__(self, connection: Connection) -> None:
        self.view = FleetView(connection)
        self.metadata = bearer(connection.credentials)
        self._connection = connection
        self._lines: dict[str, Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, address: str) -> Line:
        """Return the line to an address, kept while in use."""
        line = self._lines.get(address)
        if line is None:
            # A stage may return at a different TCP port, or never: close the unused lines of stages that are gone.
            self._close_left()
            line = self._lines[address] = Line(address, self._connection.tls)
        line.users += 1
        return line

    def _close_left(self) -> None:
        needed = {stage.registration.rollout_address for stage in self.view.stages}
        for address in [a for a, line in self._lines.items() if a not in needed and not line.users]:
            task = asyncio.create_task(self._lines.pop(address).close(LEFT_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def stream(
        self, line: Line, stage: Stage, request: GenerateRequest, deadline: float, metadata: Metadata
    ) -> Answers:
        """Return the answers of a stage, until ``deadline`` on the loop's clock.

        The stream also ends when the coordinator reports the stage lost, because the connection may not notice for
        long.
        """
        answers = line.ask(request, deadline, metadata)

        def lose() -> None:
            answers.fail(Reason.UNREACHABLE.error(f"{stage.registration.slot} is gone, says the coordinator"))

        answers.on_end = self.view.on_loss(stage, lose)
        return answers

    def on_behalf_of(self, credentials: Credentials) -> Lines:
        """Return the same view and lines with another caller's credentials."""
        lines = copy.copy(self)
        lines.metadata = bearer(credentials)
        return lines

    async def explained(self, stage: Stage, failure: RlctlError) -> RlctlError:
        """Return a failure to reach a stage, or TLS_FAILED if a certificate is the cause."""
        line = self._lines.get(stage.registration.rollout_address)
        return failure if line is None else await line.explained(failure)

    async def check_model(self, model: str, timeout_s: float) -> None:
        """Raise MODEL_NOT_FOUND if the coordinator does not know the model."""
        await self._connection.call("GetFleet", GetFleetRequest(model=model), timeout_s)

    async def check_slot(self, slot: str, timeout_s: float) -> None:
        """Raise STAGE_NOT_FOUND for a slot that is not in the fleet, instead of waiting. "" passes."""
        if not slot or any(slot == stage.registration.slot for stage in self.view.stages):
            return
        # The view may be unknown or stale.
        fleet = await self._connection.call("GetFleet", GetFleetRequest(), timeout_s)
        slots = [stage.registration.slot for stage in fleet.stages]
        if slot not in slots:
            raise Reason.STAGE_NOT_FOUND.error(
                f"no stage fills slot {slot!r}; there are: {', '.join(slots) or 'none'}", field="slot"
            )

    async def close(self) -> None:
        """Stop the view and close the lines."""
        await self.view.close()
        await asyncio.gather(*(line.close() for line in self._lines.values()), *self._closing)


class Attempt:
    """A request at one stage, or at a pair of stages, within a ``with`` block.

    Attributes:
        stage: the generating stage.
        line: the line to ``stage``.
        floor: the least version required at the time of the pick.
    """

    def __init__(self, picked: Picked, floor: int, lines: Lines, router: Router) -> None:
        self.stage = picked.stage
        self.floor = floor
        self.line = lines.take(picked.stage.registration.rollout_address)
        self._taken = [self.line]
        if picked.prefill is not None:
            self._taken.append(lines.take(picked.prefill.registration.rollout_address))
        self._picked = picked
        self._lines = lines
        self._router = router
        self._met_at: Stage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self._taken:
            line.users -= 1
        self._router.end(self._picked)

    async def whole(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> GenerateResponse:
        """Return the merged response. Raises RlctlError."""
        answer = Merged()
        async with aclosing(self.stream(request, deadline, metadata)) as parts:
            async for part in parts:
                answer.add(part)
        self.answered()
        return answer.message()

    def stream(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> Parts:
        """Return the answers, message by message; as :meth:`Lines.stream`."""
        prefill = self._picked.prefill
        if prefill is None:
            return self._lines.stream(self.line, self.stage, request, deadline, metadata)
        pair_request = prefill_decode.halves(request, prefill, self.stage)
        halves = zip(reversed(self._taken), (prefill, self.stage), strict=True)
        first, second = (self._lines.stream(line, stage, pair_request, deadline, metadata) for line, stage in halves)
        return prefill_decode.together(pair_request, first, second, lambda: self._meet(prefill))

    def _meet(self, stage: Stage) -> None:
        self._met_at = stage

    def answered(self) -> None:
        """Record that the stage accepted the request."""
        self._router.answered(self._picked)

    async def explained(self, failure: RlctlError) -> RlctlError:
        """Return a failure, or TLS_FAILED if a certificate is its cause."""
        return await self._lines.explained(self._met_at or self.stage, failure)

    def on_loss(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call ``call`` when the coordinator reports the stage lost. The returned function undoes this."""
        return self._lines.view.on_loss(self.stage, call)

    def failed(self, failure: RlctlError) -> bool:
        """Record a failure. Return True if the stage caused the failure, so that the request may go elsewhere."""
        return self._router.failed(self._picked, failure, asyncio.get_running_loop().time(), at=self._met_at)


class Dispatch:
    """Finds stages for the requests of a router."""

    def __init__(self, lines: Lines, router: Router) -> None:
        self.lines = lines
        self.router = router
        self._told: tuple[str, int] | None = None

    def at_once(self, wanted: Wanted, deadline: float) -> Attempt | None:
        """Return an attempt at a stage that may take the request now.

        Returns None without such a stage, or after ``deadline`` on the loop's clock. Raises FIELD_REQUIRED if no model
        is named and the fleet has several, and as :meth:`rlctl.client.fleet_watch.FleetView.check`.
        """
        view, now = self.lines.view, asyncio.get_running_loop().time()
        view.check()
        view.refuse_any(wanted.model)
        picked = self.router.pick(view.stages, self._of_fleet(wanted), now) if now < deadline else None
        if picked is None:
            return None
        self._told = None
        return Attempt(picked, wanted.floor, self.lines, self.router)

    async def attempt(self, wanting: Callable[[], Wanted], deadline: float, timeout_s: float) -> Attempt:
        """Wait until ``deadline`` for a stage that may take the request.

        ``wanting`` is called again for each look at the fleet. ``timeout_s`` appears in the error. Raises
        MODEL_NOT_FOUND, NO_ROUTABLE_STAGE, and as :meth:`at_once`.
        """
        view, loop = self.lines.view, asyncio.get_running_loop()
        criteria, started = self._of_fleet(wanting()), loop.time()
        while (remaining := deadline - (now := loop.time())) > 0:
            view.check()
            if view.lacks(criteria.model):
                # The view may lag behind; the coordinator decides.
                await self.lines.check_model(criteria.model, remaining)
            if (attempt := self.at_once(criteria, deadline)) is not None:
                return attempt
            try:
                async with asyncio.timeout(min(remaining, TELL_S, self.router.again_s(now))):
                    await view.changed()
            except TimeoutError:
                if loop.time() - now >= TELL_S:
                    causes = [obstacles(view.stages, criteria), _named(self.router.failures(view.stages, criteria))]
                    self._tell(", ".join(filter(None, causes)), loop.time() - started)
            criteria = self._of_fleet(wanting())
        raise await self._unplaced(criteria, timeout_s)

    async def _unplaced(self, criteria: Wanted, timeout_s: float) -> RlctlError:
        """Return NO_ROUTABLE_STAGE with the obstacle or the failure of each stage."""
        stages = self.lines.view.stages
        failures = self.router.failures(stages, criteria)
        first, others = failures[:MOST_NAMED], failures[MOST_NAMED:]
        errors = await asyncio.gather(*(self.lines.explained(stage, error) for stage, error in first))
        explained = [(stage, error) for (stage, _), error in zip(first, errors, strict=True)]
        causes = ", ".join(filter(None, [obstacles(stages, criteria), _named([*explained, *others])]))
        tls_failures = (error for error in errors if error.reason is Reason.TLS_FAILED)
        model_phrase = f"of {criteria.model} " if criteria.model else ""
        cause_phrase = f": {causes}" if causes else ""
        return Reason.NO_ROUTABLE_STAGE.error(
            f"no stage {model_phrase}took the request within {timeout_s:g} s{cause_phrase}",
            next_step=next_step(stages, criteria) or next((error.next_step for error in tls_failures), ""),
        )

    def _of_fleet(self, wanted: Wanted) -> Wanted:
        """Require the adapter at the stage if the fleet serves the adapter. A stage may lack an adapter for a while."""
        if not wanted.adapter:
            return wanted
        return wanted._replace(serves=self.lines.view.serves(wanted.model, wanted.adapter))

    def _tell(self, named: str, waited_s: float) -> None:
        """Log changed obstacles, once for all waiting requests, and again as a warning after ``WARN_S``."""
        level = logging.WARNING if waited_s >= WARN_S else logging.INFO
        if self._told is None or named != self._told[0] or level > self._told[1]:
            log.log(level, "waiting for a routable stage: %s", named or "none is known")
            self._told = (named, level)


def _named(failures: Sequence[tuple[Stage, RlctlError]]) -> str:
    """Return the first failures, such as "a failed (the engine is gone), b refused (too many requests)"."""
    phrases = [
        f"{stage.registration.slot} {'refused' if error.reason in REFUSALS else 'failed'} ({error.message})"
        for stage, error in failures[:MOST_NAMED]
    ]
    if len(failures) > MOST_NAMED:
        phrases.append(f"and {len(failures) - MOST_NAMED} more")
    return ", ".join(phrases)
