"""Rates and queues of stages for ``top``, from the counts of the ranks (GetLoads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.cli.render import stages, values
from rlctl.cli.render.printer import View
from rlctl.cli.render.tables import Table, prose
from rlctl.v1.common_pb2 import StageState
from rlctl.v1.fleet_pb2 import Fleet
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import Loads

_STAGES = ("SLOT", "STATE", "VERSION", "RUNNING", "WAITING", "KV", "TOKENS/S", "STEPS/S", "WHY NOT")
_OPERATIONS = ("OPERATION", "VERB", "MODEL", "TARGETS", "RUNS FOR")


@dataclass(frozen=True)
class Sample:
    """The counts of the ranks at a moment.

    Attributes:
        at_s: the moment, monotonic.
        loads: sums over the ranks of a stage, by slot; a stage that did not answer has no entry.
        running: running operations.
    """

    at_s: float
    fleet: Fleet
    loads: Mapping[str, Loads]
    running: Sequence[Operation] = ()


def summed(operation: Operation) -> dict[str, Loads]:
    """Return the counts of each stage that answered. Ranks that do not schedule count zero."""
    loads = {}
    for result in operation.stage_results:
        ranks = [rank.loads for rank in result.rank_results if rank.HasField("loads")]
        if ranks:
            loads[result.slot] = Loads(
                running=sum(rank.running for rank in ranks),
                waiting=sum(rank.waiting for rank in ranks),
                used_tokens=sum(rank.used_tokens for rank in ranks),
                max_tokens=sum(rank.max_tokens for rank in ranks),
                step=max(rank.step for rank in ranks),
                generated_tokens=sum(rank.generated_tokens for rank in ranks),
            )
    return loads


def top_view(endpoint: str, before: Sample | None, now: Sample) -> View:
    """Return the view of the present queues, and of the rates since the previous sample."""
    rows = [_facts(slot, before, now) for slot in (stage.registration.slot for stage in now.fleet.stages)]
    routable = sum(stage.routable for stage in now.fleet.stages)
    total = {key: sum(row[key] or 0 for row in rows) for key in ("running", "waiting", "tokens_per_s")}
    data = {
        "endpoint": endpoint,
        "epoch": str(now.fleet.header.fleet_epoch),
        "stages": rows,
        "operations": [
            {"operation_id": each.operation_id, "verb": each.verb, "model": each.model, "targets": list(each.targets)}
            for each in now.running
        ],
    }
    summary = (
        f"Fleet at {endpoint}: {routable} of {values.count(len(rows), 'stage')} routable, {total['running']} running, "
        f"{total['waiting']} waiting, {total['tokens_per_s']:.0f} tokens/s"
    )

    def tables(wide: bool) -> list[Table]:
        del wide
        cells = [
            [
                row["slot"],
                row["state"],
                row["version"],
                _text(row["running"]),
                _text(row["waiting"]),
                f"{row['used_tokens'] / row['max_tokens']:.0%}" if row["max_tokens"] else "",
                _text(row["tokens_per_s"]),
                _text(row["steps_per_s"]),
                row["why_not"],
            ]
            for row in rows
        ]
        sections = [prose([summary]), Table(_STAGES, cells, frozenset({"WHY NOT"}))]
        if now.running:
            sections.append(Table(_OPERATIONS, [_operation(each, now) for each in now.running]))
        return sections

    return View(data, tables, lambda: [row["slot"] for row in rows])


def _facts(slot: str, before: Sample | None, now: Sample) -> dict[str, Any]:
    stage = next(each for each in now.fleet.stages if each.registration.slot == slot)
    load = now.loads.get(slot)
    return {
        "slot": slot,
        "state": values.name_of(StageState.DESCRIPTOR, stage.state),
        "routable": stage.routable,
        "why_not": stages.why_not(stage),
        "version": values.version(stage.report.weight_version),
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "used_tokens": load.used_tokens if load else None,
        "max_tokens": load.max_tokens if load else None,
        "tokens_per_s": _rate(slot, "generated_tokens", before, now),
        "steps_per_s": _rate(slot, "step", before, now),
    }


def _rate(slot: str, counter: str, before: Sample | None, now: Sample) -> float | None:
    """Return the counts per second between two samples; None if a count is missing, or from a different incarnation."""
    if before is None or slot not in before.loads or slot not in now.loads or now.at_s <= before.at_s:
        return None
    grown: int = getattr(now.loads[slot], counter) - getattr(before.loads[slot], counter)
    same_incarnation = _incarnation(before.fleet, slot) == _incarnation(now.fleet, slot)
    return round(grown / (now.at_s - before.at_s), 1) if same_incarnation and grown >= 0 else None


def _incarnation(fleet: Fleet, slot: str) -> int:
    return next((stage.incarnation for stage in fleet.stages if stage.registration.slot == slot), 0)


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:g}" if isinstance(number, int) or number < 10 else f"{number:.0f}"


def _operation(operation: Operation, now: Sample) -> list[str]:
    observed = now.fleet.header.observed_at.ToNanoseconds()
    runs_s = max(0.0, (observed - operation.create_time.ToNanoseconds()) / 1e9)
    targets = values.count(len(operation.targets), "stage")
    return [operation.operation_id, operation.verb, operation.model, targets, values.elapsed(runs_s)]
