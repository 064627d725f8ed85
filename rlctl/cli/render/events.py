"""Changes of a fleet, a line each: of stages, models, operations, and of the coordinator itself."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.cli.app.settings import Settings
from rlctl.cli.render import operations, stages, tables, values
from rlctl.contract.errors import RlctlError
from rlctl.contract.outcomes import acknowledged
from rlctl.v1.common_pb2 import STAGE_STATE_RETIRED, StageState
from rlctl.v1.fleet_pb2 import FLEET_EVENT_KIND_SNAPSHOT, FleetEvent, Model, Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation, OperationState

_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-([0-9a-f]{12})")


@dataclass(frozen=True)
class Event:
    """A change.

    Attributes:
        time: time on the coordinator's wall clock, local.
        kind: stage, model, operation or coordinator.
        name: slot, model, operation id or endpoint.
        change: the fact that has changed.
        before: value before; "": no value.
        after: value now; "": no value.
        detail: reason, or details of the change.
    """

    time: str
    kind: str
    name: str
    change: str
    before: str = ""
    after: str = ""
    detail: str = ""

    @property
    def words(self) -> tuple[str, str, str, str]:
        """(subject, fact, value before, value now) for a line."""
        return (
            f"{self.kind:<9}  {self.name:<12}",
            self.change,
            f"{self.before} → " if self.before else "",
            self.after or "none",
        )


def show_event(settings: Settings, event: Event) -> None:
    """Print an event on stdout at once: a line of text, or of JSON."""
    import click

    if settings.output in ("json", "jsonl"):
        import json

        click.echo(json.dumps(dataclasses.asdict(event), ensure_ascii=False))
        return
    subject, change, before, after = event.words
    console = tables.console(settings.color)
    if console is None:
        click.echo(f"{event.time}  {subject}  {change} {before}{after}{f'  {event.detail}' * bool(event.detail)}")
        return
    from rich.table import Table
    from rich.text import Text

    line = Text.assemble(_ID.sub(r"…\1", subject), f"  {change} {before}", (after, tables.style(after)))
    line.append(f"  {event.detail}" * bool(event.detail))
    wrapped = Table.grid(padding=(0, len(tables.GAP), 0, 0))
    wrapped.add_row(Text(event.time, "dim", no_wrap=True), line)
    console.print(wrapped)


class Changes:
    """The last seen state of the fleet, and the changes since then."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._epoch = 0
        self._stages: dict[str, Stage] = {}
        self._models: dict[str, Model] = {}
        self._running: dict[str, Operation] | None = None
        self._seen: set[str] = set()
        """Operations of the previous list."""

    def of_fleet(self, event: FleetEvent) -> Iterator[Event]:
        """Yield the changes of a fleet event. The first event is the base of all changes."""
        first, time = self._epoch == 0, values.moment(event.time)
        epoch = event.fleet.header.fleet_epoch
        if epoch != self._epoch and not first:
            yield Event(time, "coordinator", self._endpoint, "epoch", str(self._epoch), str(epoch))
        self._epoch = epoch
        fresh_stages = {stage.registration.slot: stage for stage in event.fleet.stages}
        if event.kind == FLEET_EVENT_KIND_SNAPSHOT:
            for slot in sorted(self._stages.keys() - fresh_stages.keys()):
                yield Event(time, "stage", slot, "state", _state(self._stages.pop(slot)), "RETIRED")
        for slot, stage in sorted(fresh_stages.items()):
            before = self._stages.get(slot)
            if not first:
                yield from _of_stage(time, before, stage)
            self._stages[slot] = stage
            if stage.state == STAGE_STATE_RETIRED:
                del self._stages[slot]
        for model in event.fleet.models:
            if not first:
                yield from _of_model(time, self._models.get(model.name), model)
            self._models[model.name] = model

    def of_operations(self, listed: Sequence[Operation]) -> Iterator[Event]:
        """Yield the begun and ended operations since the previous list, oldest first. The first list counts as seen.

        ``listed``: newest first, from the newest operation to one of the previous list at least.
        """
        first, running = self._running is None, self._running or {}
        fresh = {each.operation_id for each in itertools.takewhile(self._is_fresh, listed)}
        for operation in reversed(listed):
            if operation.operation_id in fresh or operation.operation_id in running:
                if not first:
                    if operation.operation_id not in running:
                        yield started(operation)
                    if operation.state != OPERATION_STATE_RUNNING:
                        yield ended(operation)
                running.pop(operation.operation_id, None)
                if operation.state == OPERATION_STATE_RUNNING:
                    running[operation.operation_id] = operation
        self._seen = {each.operation_id for each in listed} or self._seen
        self._running = running

    def unlisted(self, listed: Sequence[Operation]) -> list[str]:
        """Return operations that ran at the previous list and are not in this list."""
        return [key for key in self._running or () if key not in {each.operation_id for each in listed}]

    def may_be_cut(self, listed: Sequence[Operation]) -> bool:
        """Return whether the list is too short for all operations begun since the previous list."""
        return self._running is not None and bool(listed) and all(map(self._is_fresh, listed))

    def _is_fresh(self, operation: Operation) -> bool:
        return operation.operation_id not in self._seen

    def of_loss(self, error: RlctlError) -> Event:
        now = Timestamp()
        now.GetCurrentTime()
        return Event(values.moment(now), "coordinator", self._endpoint, "state", "", "UNREACHABLE", error.message)


def started(operation: Operation) -> Event:
    parts = [values.count(len(operation.targets), "stage"), *_by(operation)]
    return _of_operation(operation, values.moment(operation.create_time), "RUNNING", ", ".join(parts))


def ended(operation: Operation) -> Event:
    update = operations.is_update(operation)
    confirmed = sum(acknowledged(result, update=update) for result in operation.stage_results)
    took = (operation.done_time.ToNanoseconds() - operation.create_time.ToNanoseconds()) / 1e9
    parts = [f"{confirmed}/{len(operation.targets)} confirmed", f"took {values.elapsed(max(0.0, took))}"]
    if update and operation.weight_version.label:
        parts.append(f"version {values.version(operation.weight_version)}")
    parts += _by(operation)
    if operation.error.reason:
        parts.append(values.error(operation.error))
    state = values.name_of(OperationState.DESCRIPTOR, operation.state)
    return _of_operation(operation, values.moment(operation.done_time), state, ", ".join(parts))


def _of_operation(operation: Operation, time: str, state: str, detail: str) -> Event:
    return Event(time, "operation", operation.operation_id, operation.verb, "", state, detail)


def _by(operation: Operation) -> list[str]:
    has_name = operation.caller.principal not in ("", "anonymous")
    return [f"by {values.principal(operation.caller)}"] if has_name else []


def _of_stage(time: str, before: Stage | None, now: Stage) -> Iterator[Event]:
    slot = now.registration.slot
    if before is None:
        yield Event(time, "stage", slot, "state", "", _state(now), _why_not(now))
        return
    facts = _stage_facts(before), _stage_facts(now)
    changed = [name for name in facts[1] if facts[0][name] != facts[1][name]]
    if "state" in changed and "routable" in changed:
        changed.remove("routable")  # shown by the state, or by the reason beside the state
    for name in changed:
        detail = _why_not(now) if name in ("state", "routable", "failures") else ""
        yield Event(time, "stage", slot, name, facts[0][name], facts[1][name], detail)


def _why_not(stage: Stage) -> str:
    return "" if stage.routable else stages.why_not(stage)


def _stage_facts(stage: Stage) -> dict[str, str]:
    return {
        "incarnation": str(stage.incarnation),
        "state": _state(stage),
        "routable": values.yes(stage.routable),
        "version": values.version(stage.report.weight_version),
        "enabled": values.yes(stage.enabled),
        "quarantine": stage.quarantine.reason,
        "failures": str(stage.engine_failure.failures or ""),
        "adapters": values.adapters(stage.report.adapters),
    }


def _of_model(time: str, before: Model | None, now: Model) -> Iterator[Event]:
    facts = _model_facts(before or Model()), _model_facts(now)
    details = {"update": f"by {now.update_owner}" if now.update_owner else ""}
    for name in facts[1]:
        if facts[0][name] != facts[1][name]:
            yield Event(time, "model", now.name, name, facts[0][name], facts[1][name], details.get(name, ""))


def _model_facts(model: Model) -> dict[str, str]:
    return {
        "version": values.version(model.latest),
        "update": model.update_id,
        "adapters": values.adapters(model.adapters),
    }


def _state(stage: Stage) -> str:
    return values.name_of(StageState.DESCRIPTOR, stage.state)
