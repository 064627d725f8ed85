"""Sends requests to stages without a proxy: waits for a routable stage, and records failures of stages."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Self

from rlctl.client.connection import Connection
from rlctl.client.fleet_watch import FleetView
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.partial_responses import Merged
from rlctl.rollout import prefill_decode
from rlctl.rollout.picking.router import Picked, Router, Wanted, next_step, obstacles
from rlctl.rollout.stage_stream import LEFT_S, Answers, Line, Metadata, Parts
from rlctl.transport.channel import Credentials, bearer
from rlctl.v1.coordinator_pb2 import GetFleetRequest
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse

log = logging.getLogger(__name__)

TELL_S = 1.0
"""Without a routable stage, what is waited for is logged after so long."""

WARN_S = 10.0
"""And so long after, as a warning: longer than most pauses, and a script that sets up no logging shows it."""


class Lines:
    """What all callers of one fleet share: the view of it, and a line to every stage that there is."""

    def __init__(self, connection: Connection) -> None:
        self.view = FleetView(connection)
        self.metadata = bearer(connection.credentials)
        self._connection = connection
        self._lines: dict[str, Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, address: str) -> Line:
        """The line to an address, kept for as long as it has users."""
        line = self._lines.get(address)
        if line is None:
            # Stages come back at other ports, or not at all: those that have gone make way for those that come.
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
        """What one stage generates, until ``deadline`` on the loop's clock. Ends also when the coordinator says that
        the stage is gone, which its connection may not tell for long.
        """
        answers = line.ask(request, deadline, metadata)

        def lose() -> None:
            answers.fail(Reason.UNREACHABLE.error(f"{stage.registration.slot} is gone, says the coordinator"))

        answers.on_end = self.view.on_loss(stage, lose)
        return answers

    def on_behalf_of(self, credentials: Credentials) -> Lines:
        """The same view and lines with another caller's credentials."""
        other = copy.copy(self)
        other.metadata = bearer(credentials)
        return other

    async def check_model(self, model: str, timeout_s: float) -> None:
        """Ask the coordinator, and raise MODEL_NOT_FOUND for a model that the fleet does not have."""
        await self._connection.call("GetFleet", GetFleetRequest(model=model), timeout_s)

    async def check_slot(self, slot: str, timeout_s: float) -> None:
        """Raise STAGE_NOT_FOUND for a slot ("": none) that the fleet does not have: nobody waits for it to serve."""
        if not slot or any(slot == stage.registration.slot for stage in self.view.stages):
            return
        # The view may not be there yet, or lag behind.
        fleet = await self._connection.call("GetFleet", GetFleetRequest(), timeout_s)
        there = [stage.registration.slot for stage in fleet.stages]
        if slot not in there:
            raise Reason.STAGE_NOT_FOUND.error(
                f"no stage fills slot {slot!r}; there are: {', '.join(there) or 'none'}", field="slot"
            )

    async def close(self) -> None:
        """Stop watching, close the lines."""
        await self.view.close()
        await asyncio.gather(*(line.close() for line in self._lines.values()), *self._closing)


class Attempt:
    """A request at one stage, or at a pair, from ``with`` to its end.

    Attributes:
        stage: the one that generates.
        line: the way to it.
        floor: the least version that was wanted when it was picked.
    """

    def __init__(self, picked: Picked, floor: int, lines: Lines, router: Router) -> None:
        """It is under way since it was picked."""
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
        """Go on."""
        return self

    def __exit__(self, *_: object) -> None:
        """It has ended there, however it did."""
        for line in self._taken:
            line.users -= 1
        self._router.end(self._picked)

    async def whole(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> GenerateResponse:
        """All that is generated. Raises RlctlError."""
        answer = Merged()
        async with aclosing(self.stream(request, deadline, metadata)) as parts:
            async for part in parts:
                answer.add(part)
        self.answered()
        return answer.message()

    def stream(self, request: GenerateRequest, deadline: float, metadata: Metadata) -> Parts:
        """What is generated, message by message; as :meth:`Lines.stream`."""
        prefill = self._picked.prefill
        if prefill is None:
            return self._lines.stream(self.line, self.stage, request, deadline, metadata)
        asked = prefill_decode.halves(request, prefill, self.stage)
        both = zip(reversed(self._taken), (prefill, self.stage), strict=True)
        first, second = (self._lines.stream(line, stage, asked, deadline, metadata) for line, stage in both)
        return prefill_decode.together(asked, first, second, lambda: self._meet(prefill))

    def _meet(self, stage: Stage) -> None:
        self._met_at = stage

    def answered(self) -> None:
        """It was taken."""
        self._router.answered(self._picked)

    def on_loss(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call it when the coordinator declares the stage lost, until the returned function is called."""
        return self._lines.view.on_loss(self.stage, call)

    def failed(self, failure: RlctlError) -> bool:
        """It met a failure; returns whether that was the stage's, so that another one may be asked."""
        return self._router.failed(self._picked, failure, asyncio.get_running_loop().time(), at=self._met_at)


class Dispatch:
    """Finds stages for the requests of one router."""

    def __init__(self, lines: Lines, router: Router) -> None:
        self.lines = lines
        self.router = router
        self._told: tuple[str, int] | None = None

    def at_once(self, wanted: Wanted, deadline: float) -> Attempt | None:
        """A stage that may take the request now, if there is one and ``deadline`` on the loop's clock lies ahead.

        Raises FIELD_REQUIRED where no model is named and there are several, and as
        :meth:`rlctl.client.fleet_watch.FleetView.check`.
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
        """A stage that may take the request, waited for until ``deadline``; ``timeout_s`` is named when none did.
        What is wanted is asked for anew at every look. Raises MODEL_NOT_FOUND, NO_ROUTABLE_STAGE, and as
        :meth:`at_once`.
        """
        view, loop = self.lines.view, asyncio.get_running_loop()
        wanted, begun = self._of_fleet(wanting()), loop.time()
        while (remaining := deadline - (now := loop.time())) > 0:
            view.check()
            if view.lacks(wanted.model):
                # The view may lag behind; the coordinator says whether that is so.
                await self.lines.check_model(wanted.model, remaining)
            if (attempt := self.at_once(wanted, deadline)) is not None:
                return attempt
            try:
                async with asyncio.timeout(min(remaining, TELL_S, self.router.again_s(now))):
                    await view.changed()
            except TimeoutError:
                if loop.time() - now >= TELL_S:
                    self._tell(obstacles(view.stages, wanted), loop.time() - begun)
            wanted = self._of_fleet(wanting())
        whose = f"of {wanted.model} " if wanted.model else ""
        named = obstacles(view.stages, wanted)
        why = f": {named}" if named else ""
        raise Reason.NO_ROUTABLE_STAGE.error(
            f"no stage {whose}took the request within {timeout_s:g} s{why}", next_step=next_step(view.stages, wanted)
        )

    def _of_fleet(self, wanted: Wanted) -> Wanted:
        """A stage may lack for a while what its fleet serves: those that do not are waited for."""
        if not wanted.adapter:
            return wanted
        return wanted._replace(serves=self.lines.view.serves(wanted.model, wanted.adapter))

    def _tell(self, named: str, waited_s: float) -> None:
        """Log what is waited for, once however many requests wait for it, and once more when it takes long."""
        level = logging.WARNING if waited_s >= WARN_S else logging.INFO
        if self._told is None or named != self._told[0] or level > self._told[1]:
            log.log(level, "waiting for a routable stage: %s", named or "none is known")
            self._told = (named, level)
