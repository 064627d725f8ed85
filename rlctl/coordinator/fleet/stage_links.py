"""Links to the stages, with redials after a loss, and serving grants over the links."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from google.protobuf.any_pb2 import Any

from rlctl.command_stream.commander import Commander, Issued
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.inflight_replay import Unanswered
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import adoptable, first_digest, lacking, proven_by_key, surplus
from rlctl.ports import REFUSED, Clock, Dialer, Journal
from rlctl.v1.common_pb2 import (
    OUTCOME_NOT_SENT,
    STAGE_STATE_DIRTY,
    STAGE_STATE_FAILED,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
    StageState,
    Target,
)
from rlctl.v1.control_pb2 import Attach, ControlRequest, ControlResponse, ServingGrant
from rlctl.v1.fleet_pb2 import StageReport
from rlctl.version import CONTRACT_VERSION

log = logging.getLogger(__name__)

SERVING_LEASE_S = 10.0
DRIFT_S = 0.5
"""Most that a lease may last longer on a stage's clock than on the coordinator's clock."""
GRANT_EVERY_S = 3.0
REDIAL_S = (0.1, 0.2, 0.5, 1.0, 2.0)
ATTACH_S = 10.0
CONNECTING = 32
TURN_S = 0.1
"""At most ``CONNECTING`` links are being made at a time, each counted for at most ``TURN_S``. During a take-over of a
thousand stages the coordinator thus answers its callers, and silent hosts block no other link."""
REPORT_AGAIN_S = 1.0
REPLACED = "an engine that was replaced"
TAKE_OVER = "`rlctl take-over {}` takes it back if no other coordinator is to hold it"


class Peers:
    """Links to the stages, with a task for each filled slot."""

    def __init__(
        self,
        roster: Roster,
        dialer: Dialer[ControlRequest, ControlResponse],
        clock: Clock,
        journal: Journal,
        on_report: Callable[[Slot], Awaitable[None]],
        *,
        lease_s: float = SERVING_LEASE_S,
    ) -> None:
        self._roster = roster
        self._journal = journal
        self._dialer = dialer
        self._clock = clock
        self._on_report = on_report
        self._lease_s = lease_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reports: set[asyncio.Task[None]] = set()
        self._again: set[Slot] = set()
        self._grants = itertools.count(1)
        self._unanswered = Unanswered(lease_s + DRIFT_S)
        self._connecting = asyncio.Semaphore(CONNECTING)
        self.succeeded = asyncio.Event()
        """Set once another coordinator owns the journal."""

    def connect(self, slot: Slot) -> None:
        """Keep a link to the process in a slot until it is replaced or retired, or the coordinator stops."""
        former = self._tasks.get(slot.name)
        if former is not None and not former.done():
            if former.get_name() == _task_name(slot):
                return
            former.cancel()
        self._tasks[slot.name] = asyncio.create_task(self._keep(slot), name=_task_name(slot))

    async def disconnect(self) -> None:
        """Close every link. The links are then dialled again."""
        for slot in list(self._roster.slots.values()):  # stages may register meanwhile
            if slot.commander is not None:
                await slot.commander.close()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def grant(self, slot: Slot, *, adopt: bool = False, silence: bool = False, confirm: bool = False) -> int:
        """Grant a stage its serving lease and admitted versions. Returns the grant's number, or 0 if no grant was sent.

        A stage gets no lease if the stage is quarantined, FAILED or silenced, or owes a pause by name. An adapter whose
        pause by name the stage owes is withheld.

        The lease runs from the stage's latest message (``echo``), not from the arrival of the grant.

        Args:
            adopt: the stage's weights are the latest version (see *adoption* in the glossary).
            silence: earlier confirmations no longer count, even if no link can carry the grant.
            confirm: the stage's next report confirms the grant.
        """
        number = next(self._grants)
        if silence and slot.report is not None:  # without a report, an earlier process may serve
            slot.silent_from = number
        commander = slot.commander
        if commander is None or commander.lost or slot.report is None or not self._holds_journal():
            return 0  # a successor may own the journal, and knows earlier leases only
        model = self._roster.models[slot.model]
        withheld = model.only is not None and slot not in model.only
        failed = slot.report.state == STAGE_STATE_FAILED
        serves_none = withheld or failed or slot.owes_pause or slot.record.HasField("quarantine")
        lease_s = 0.0 if serves_none else self._lease_s
        withheld_adapters = slot.withheld_adapters = slot.owed_adapters
        if lease_s:
            slot.lease_until = max(slot.lease_until, commander.echoed_at + lease_s + DRIFT_S)
        commander.grant(
            ServingGrant(
                fleet_epoch=self._roster.epoch,
                admitted=[] if slot.restoring else model.admitted,
                lease=duration(lease_s),
                adopt=model.record.latest if adopt else None,
                adopt_digest=model.record.model_digest if adopt and proven_by_key(model.record, slot) else "",
                number=number,
                echo=commander.echo,
                confirm=confirm or (withheld and slot.silent_from > 0 and not self._is_silent(slot)),
                adapters=[adapter for adapter in model.record.adapters if adapter.name not in withheld_adapters],
                withheld_adapters=withheld_adapters,
            )
        )
        return number

    async def hold_back(self, slots: Sequence[Slot], why: str) -> None:
        """Let stages serve nothing while a heal or update brings them to a version that is admitted already.

        ``restoring`` withholds the versions, regardless of reports. The quarantine does so also under the next
        coordinator.
        """
        cause = Reason.WEIGHTS_STALE.error(why).detail()
        await self._roster.quarantine(dict.fromkeys(slots, cause))
        for slot in slots:
            slot.restoring = True
            self.grant(slot)

    async def tell(self, model: ModelState) -> None:
        """Return once each stage of a model has confirmed its new grant or can no longer serve by earlier grants."""
        slots = [slot for slot in self._roster.slots.values() if slot.model == model.record.name]
        leases = {slot: slot.lease_until for slot in slots}
        numbers = {slot: self.grant(slot, confirm=True) for slot in slots}

        def until() -> float:
            ends = [leases[slot] for slot in slots if not self._took(slot, numbers[slot])]
            return max((*ends, self._roster.formers.until(model.record.name)))

        await self._passed(until)

    async def generating(self, target: Target, addressed: Collection[Slot], deadline: float) -> str:
        """Wait until each stage of a target, except ``addressed`` stages, has paused or its lease has ended.

        The results of the addressed stages confirm their pause. Returns "", or at the deadline the name of a stage that
        may still generate.
        """
        absent = self._absent(target, addressed)

        def may() -> dict[str, float]:
            ends = {REPLACED: self._roster.formers.until_of_target(target)}
            return ends | {
                slot.name: slot.lease_until for slot in absent if not (slot.gone or (slot.linked and slot.has_paused))
            }

        return await self._until_none(may, deadline)

    async def generating_with(self, adapter: str, target: Target, addressed: Collection[Slot], deadline: float) -> str:
        """Wait as in :meth:`generating`, for requests with an adapter whose pause by name is in force.

        A stage has also stopped once it has confirmed a grant without the adapter. The lease may continue.
        """
        absent = self._absent(target, addressed)
        leases = {slot: slot.lease_until for slot in absent}
        numbers = {slot: self.grant(slot, confirm=True) for slot in absent}

        def has_stopped(slot: Slot) -> bool:
            paused = slot.linked and slot.has_paused_adapter(adapter)
            return slot.gone or paused or self._took(slot, numbers[slot])

        def may() -> dict[str, float]:
            ends = {REPLACED: self._roster.formers.until_of_target(target)}
            return ends | {slot.name: leases[slot] for slot in absent if not has_stopped(slot)}

        return await self._until_none(may, deadline)

    def _absent(self, target: Target, addressed: Collection[Slot]) -> list[Slot]:
        return [slot for slot in self._roster.covered(target) if slot not in addressed]

    async def _until_none(self, may: Callable[[], Mapping[str, float]], deadline: float) -> str:
        """Wait until ``may`` is empty. Returns "", or at the deadline a name that remains.

        ``may`` returns the ends of the leases that may still serve, by name.
        """

        def remaining() -> dict[str, float]:
            return {name: until for name, until in may().items() if until > self._clock.now()}

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline - self._clock.now()):
                await self._passed(lambda: max(remaining().values(), default=float("-inf")))
        return next(iter(remaining()), "")

    async def _passed(self, until: Callable[[], float]) -> None:
        """Return once the time ``until()`` has passed. Reports of stages can bring the time forward."""
        while (remaining := until() - self._clock.now()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining):
                    await self._roster.until(lambda: until() <= self._clock.now())

    def _took(self, slot: Slot, number: int) -> bool:
        """Whether the process in a slot has confirmed a grant, or is gone."""
        if self._roster.slots.get(slot.name) is not slot:
            return slot.gone
        linked = slot.commander is not None and not slot.commander.lost
        return linked and slot.report is not None and slot.report.grant_number >= number > 0

    async def silence(self, model: ModelState, only: Iterable[Slot]) -> None:
        """Allow only the stages ``only`` of a model to serve. Return once each other stage has confirmed or its lease
        has ended.

        :meth:`speak` ends the silence.
        """
        model.only = frozenset(only)
        for slot in self._others(model):
            self.grant(slot, silence=True)

        def until() -> float:
            ends = [slot.lease_until for slot in self._others(model) if not self._is_silent(slot)]
            return max((*ends, self._roster.formers.until(model.record.name)))

        self._log_wait(model, until() - self._clock.now())
        await self._passed(until)

    def _log_wait(self, model: ModelState, at_most_s: float) -> None:
        """Log the stages whose serving leases must end before a publish. A linked stage confirms in a moment."""
        cut = [slot.name for slot in self._others(model) if not (self._is_silent(slot) or slot.linked)]
        former = ["a replaced process"] if self._roster.formers.until(model.record.name) > self._clock.now() else []
        if cut or former:
            names = ", ".join([*cut, *former])
            log.info("%s: the publish waits up to %.1f s for serving leases: %s", model.record.name, at_most_s, names)

    def speak(self, model: ModelState) -> None:
        """Allow every stage of a model to serve the admitted versions."""
        model.only = None
        self.grant_model(model.record.name)

    def _others(self, model: ModelState) -> list[Slot]:
        slots = self._roster.slots.values()
        return [slot for slot in slots if slot.model == model.record.name and slot not in (model.only or ())]

    def _is_silent(self, slot: Slot) -> bool:
        if self._clock.now() >= slot.lease_until:
            return True
        linked = slot.commander is not None and not slot.commander.lost and slot.report is not None
        return linked and slot.report is not None and slot.report.grant_number >= slot.silent_from > 0

    def grant_model(self, model: str) -> None:
        for slot in self._roster.slots.values():
            if slot.model == model:
                self.grant(slot)

    def outlive_predecessor(self) -> None:
        """After a take-over, assume that stages serve under leases of the previous coordinator.

        Replaced processes may serve too. Only the previous coordinator knew the versions and leases there.
        """
        now, slots = self._clock.now(), self._roster.slots.values()
        for slot in slots:
            slot.lease_until = now + self._lease_s + DRIFT_S
        if any(slot.record.incarnation > 1 for slot in slots):
            for model in self._roster.models:
                self._roster.formers.add("", model, now + self._lease_s + DRIFT_S, now)

    def issue(
        self, slot: Slot, command_id: str, operation_id: str, request: Any, deadline: float, *, again: bool
    ) -> Issued:
        """Send a command. Call :meth:`succession` just before.

        If the link breaks and ``again`` is set, the command is repeated over the next link. Raises UNREACHABLE with
        outcome NOT_SENT without a link.
        """
        if slot.commander is None or slot.commander.lost:
            raise Reason.UNREACHABLE.error(f"there is no link to {slot.name}", outcome=OUTCOME_NOT_SENT)
        return slot.commander.issue(command_id, operation_id, request, deadline, again=again)

    def cancel(self, slot: Slot, command_id: str) -> None:
        """Cancel a command that the stage has not started."""
        if slot.commander is not None:
            slot.commander.cancel(command_id)
        self._unanswered.withdraw(slot, command_id)

    def _holds_journal(self) -> bool:
        if not self._journal.owned():
            self.succeeded.set()
        return not self.succeeded.is_set()

    def _refuse_succeeded(self) -> None:
        succeeded = self.succession()
        if succeeded is not None:
            raise succeeded

    def succession(self) -> RlctlError | None:
        """Return why no command may be sent if another coordinator owns the journal, otherwise None."""
        return None if self._holds_journal() else self.succeeded_error()

    @staticmethod
    def succeeded_error() -> RlctlError:
        return Reason.JOURNAL_FAILED.error(
            "the journal's file was moved or replaced: this coordinator sends no more commands",
            outcome=OUTCOME_NOT_SENT,
            next_step="Start a coordinator on the file that holds the fleet's records.",
        )

    async def _keep(self, slot: Slot) -> None:
        tries, logged = 0, ""
        try:
            while not slot.record.retired and self._roster.slots.get(slot.name) is slot:
                try:
                    await self._once(slot)
                    tries, logged = 0, ""
                except RlctlError as error:
                    if str(error) != logged:  # otherwise logged every two seconds while the stage is away
                        log.info("%s: %s", slot.name, error)
                    logged = str(error)
                    foreign_epoch = _has_foreign_epoch(error)
                    away = f"{error.message}; {TAKE_OVER.format(slot.name)}" if foreign_epoch else error.message
                    is_gone = slot.gone or REFUSED in error.metadata
                    if (slot.gone, slot.away) != (is_gone, away):
                        slot.gone, slot.away, slot.foreign_epoch = is_gone, away, foreign_epoch
                        self._roster.changed()
                if self.succeeded.is_set():
                    return
                await asyncio.sleep(REDIAL_S[min(tries, len(REDIAL_S) - 1)])
                tries += 1
        finally:
            self._unanswered.end(slot)

    async def _once(self, slot: Slot) -> None:
        registration = slot.record.registration
        connected = await self._turn_to_connect()
        self._refuse_succeeded()
        link = await self._dialer.dial(registration.address)
        commander = Commander(
            link,
            self._clock,
            on_report=lambda report: self._reported(slot, report),
            on_lost=lambda lost: self._unanswered.keep(slot, lost),
        )
        receiving = asyncio.create_task(commander.run())
        granting: asyncio.Task[None] | None = None
        epoch = self._roster.epoch
        try:
            async with asyncio.timeout(ATTACH_S):
                attached = await commander.attach(
                    Attach(
                        fleet_epoch=epoch,
                        slot=slot.name,
                        incarnation=slot.record.incarnation,
                        contract_version=CONTRACT_VERSION,
                    )
                )
            if attached.registration.boot_id != registration.boot_id:
                raise Reason.INCARNATION_FENCED.error(
                    f"{slot.name} is filled by a different process than the registered one"
                )
            if slot.record.unseen:
                await self._meet(slot, attached.report)
            self._refuse_succeeded()
            if epoch != self._roster.epoch:
                raise Reason.EPOCH_FENCED.error(
                    f"{slot.name} was attached under epoch {epoch}, and the present epoch is {self._roster.epoch}"
                )
            if slot.record.retired:
                raise Reason.STAGE_NOT_FOUND.error(f"{slot.name} was deregistered meanwhile")
            slot.commander, slot.gone, slot.away, slot.foreign_epoch = commander, False, "", False
            self._roster.formers.forget(registration.address)
            connected()
            self._unanswered.ask(slot, commander)
            latest = slot.report  # a newer report may have arrived while the stage was met
            newer = latest is not None and latest.revision > attached.report.revision
            self._reported(slot, latest if latest is not None and newer else attached.report)
            granting = asyncio.create_task(self._keep_granting(slot, commander))
            await receiving
        except TimeoutError:
            raise Reason.UNREACHABLE.error(f"{slot.name} did not answer the attach in {ATTACH_S:g} s") from None
        finally:
            if granting is not None:
                granting.cancel()
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            self._roster.changed()

    async def _meet(self, slot: Slot, report: StageReport) -> None:
        """Quarantine a new process in a slot that reports a version or an open update.

        A fresh process reports neither. A process that was replaced and has returned does. The earlier quarantine
        is forgotten, and the weights are unproven since.
        """
        if report.weight_version.sequence or report.update_id:
            cause = "the process had been replaced by another process; its weights and open update are unproven"
            await self._roster.quarantine({slot: Reason.WEIGHTS_STALE.error(cause).detail()})
        await self._roster.change([slot], lambda record: setattr(record, "unseen", False))

    async def _turn_to_connect(self) -> Callable[[], None]:
        """Wait for a turn. Returns the function that ends the turn. The turn also ends by time."""
        await self._connecting.acquire()
        permits = [self._connecting]

        def end() -> None:
            while permits:
                permits.pop().release()

        asyncio.get_running_loop().call_later(TURN_S, end)
        return end

    async def _keep_granting(self, slot: Slot, commander: Commander) -> None:
        while self._holds_journal():
            # Reports of other stages may have decided whether the stage's first weights are the version.
            if first_digest(self._roster, slot) is not None:
                self._consider(slot)
            self.grant(slot, adopt=adoptable(self._roster, slot))
            await asyncio.sleep(GRANT_EVERY_S)
        # Close the link: a stage with a link here would never register with the successor.
        await commander.close()

    def _reported(self, slot: Slot, report: StageReport) -> None:
        first = slot.report is None
        _log_damage(slot.name, slot.report, report)
        slot.report = report
        admitted = report.weight_version in self._roster.models[slot.model].admitted
        slot.late = slot.late and not (report.state == STAGE_STATE_READY and admitted)
        self._roster.changed()
        stale = slot.late and report.state == STAGE_STATE_STALE
        unsettled = report.update_id or report.paused_by_update or slot.record.continue_when_resident or slot.owes_pause
        other_adapters = lacking(self._roster, slot) or surplus(self._roster, slot)
        other_pauses = slot.owed_adapters or slot.unkept_adapters or slot.withheld_adapters
        if first or adoptable(self._roster, slot) or unsettled or stale or other_adapters or other_pauses:
            self._consider(slot)

    def _consider(self, slot: Slot) -> None:
        task = asyncio.create_task(self._take_in(slot))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _take_in(self, slot: Slot) -> None:
        while self._roster.slots.get(slot.name) is slot:
            try:
                await self._on_report(slot)
            except RlctlError as error:
                log.warning("%s: its report could not be taken in: %s", slot.name, error)
                if slot in self._again:
                    return  # a waiting task takes in the latest report
                self._again.add(slot)
                await asyncio.sleep(REPORT_AGAIN_S)
                self._again.discard(slot)
                continue
            self.grant(slot, adopt=adoptable(self._roster, slot))
            return


def _log_damage(name: str, before: StageReport | None, report: StageReport) -> None:
    previous = before or StageReport()
    if STAGE_STATE_DIRTY in (previous.state, report.state) and previous.state != report.state:
        log.warning("%s was %s, and is %s", name, _state_name(previous.state), _state_name(report.state))
    dead = {rank.coordinates.rank for rank in previous.ranks if not rank.alive}
    for rank in report.ranks:
        if not rank.alive and rank.coordinates.rank not in dead:
            log.warning("%s: rank %d is gone: %s", name, rank.coordinates.rank, rank.reason)


def _state_name(state: StageState.ValueType) -> str:
    return StageState.Name(state).removeprefix("STAGE_STATE_")


def _has_foreign_epoch(error: RlctlError) -> bool:
    """Whether a stage obeys the epoch of another fleet's coordinator."""
    return error.reason is Reason.EPOCH_FENCED


def _task_name(slot: Slot) -> str:
    return f"link {slot.name} {slot.record.incarnation} {slot.record.registration.address}"
