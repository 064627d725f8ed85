"""The timeline of an operation: as a table with bars, and as a page of HTML without outside resources."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlctl.cli.render import values
from rlctl.cli.render.tables import Table
from rlctl.contract.durations import seconds
from rlctl.runtime.progress_line import size
from rlctl.v1.common_pb2 import Outcome, Transport, VerificationLevel
from rlctl.v1.results_pb2 import Operation, OperationState, Phase, PhaseKind, StagePhase

WIDTH = 30
"""Characters of a bar in the terminal."""

WAIT = "wait"
"""Name of the time in which no phase runs. The coordinator then waits for the trainer."""

_LEAST_WAIT = 0.01
"""Smallest share of the whole time for which a wait is shown."""


@dataclass(frozen=True)
class Bar:
    """A phase, the part of a stage in it, or a wait between phases.

    Attributes:
        name: kind of the phase, or the slot.
        start_s: time from the acceptance of the operation.
        last: the stage, or the rank, that took longest.
        moved: bytes that arrived.
        rate: bytes per second. 0: not measured.
        note: an outcome other than APPLIED, a failed level, the transport.
        stages: the parts of the stages, slowest first.
    """

    name: str
    start_s: float
    length_s: float
    last: str = ""
    moved: int = 0
    rate: float = 0.0
    note: str = ""
    stages: tuple[Bar, ...] = ()

    @property
    def end_s(self) -> float:
        return self.start_s + self.length_s


def bars(operation: Operation) -> list[Bar]:
    """Return the phases in order of start, with the waits between."""
    phases = sorted(map(_bar, operation.timeline.phases), key=lambda bar: bar.start_s)
    total_s = _total_s(operation, phases)
    all_bars: list[Bar] = []
    until_s = 0.0
    for bar in phases:
        all_bars += _wait(until_s, bar.start_s, total_s)
        all_bars.append(bar)
        until_s = max(until_s, bar.end_s)
    return all_bars


def running(operation: Operation) -> list[str]:
    """Return the running phases, with the times so far and the numbers of stages that have answered."""
    return [
        f"{_name(phase)} {values.duration(phase.duration)}"
        + (f" ({len(phase.stages)} of {phase.stage_count} stages)" if phase.stage_count else "")
        for phase in _running(operation)
    ]


def answered(operation: Operation) -> tuple[int, int]:
    """Return the numbers of stages that have answered and that are addressed: in the running phase, or in all."""
    for phase in reversed(_running(operation)):
        if phase.stage_count:
            return len(phase.stages), phase.stage_count
    return len(operation.stage_results), len(operation.targets)


def _running(operation: Operation) -> list[Phase]:
    return [phase for phase in operation.timeline.phases if phase.running]


def table(operation: Operation) -> Table:
    """Return a row for each phase, with the place in the whole time."""
    all_bars = bars(operation)
    total_s = _total_s(operation, all_bars)
    rows = [
        (
            bar.name,
            values.elapsed(bar.start_s),
            values.elapsed(bar.length_s),
            _drawn(bar, total_s),
            bar.last,
            size(bar.moved) if bar.moved else "",
            f"{size(round(bar.rate))}/s" if bar.rate else "",
            bar.note,
        )
        for bar in all_bars
    ]
    headers = ("PHASE", "START", "TIME", f"OF {values.elapsed(total_s)}", "LAST", "MOVED", "RATE", "NOTE")
    return Table(headers, rows, frozenset({"LAST", "MOVED", "RATE", "NOTE"}), title="Timeline:")


def page(operation: Operation, most: int = sys.maxsize) -> str:
    """Return a page of HTML: each phase with stages and ranks.

    ``most``: limit of the stages listed for a phase, and of the ranks of a stage; the slowest stages come first.
    """
    all_bars = bars(operation)
    total_s = _total_s(operation, all_bars)
    state = values.name_of(OperationState.DESCRIPTOR, operation.state)
    facts = {
        "Operation": operation.operation_id,
        "Model": operation.model,
        "Version": values.version(operation.weight_version),
        "Accepted": values.moment(operation.create_time),
        "Time": values.elapsed(total_s),
        "Paused": values.duration(operation.pause_time) if operation.HasField("pause_time") else "",
        "Verified": values.verification(operation.verification),
        "Targets": str(len(operation.targets)),
        "Error": values.error(operation.error),
    }
    fact_list = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value)
    rows = "".join(_row(bar, total_s, most) for bar in all_bars)
    title = f"{operation.verb} {state}"
    return _PAGE.format(title=_text(title), facts=fact_list, rows=rows, end=_text(values.elapsed(total_s)))


def _total_s(operation: Operation, shown: Sequence[Bar]) -> float:
    ended_s = 0.0
    if operation.HasField("done_time"):
        ended_s = (operation.done_time.ToNanoseconds() - operation.create_time.ToNanoseconds()) / 1e9
    return max([ended_s, *(bar.end_s for bar in shown), 1e-9])  # the wall clock may have been set back


def _wait(since_s: float, until_s: float, total_s: float) -> Iterator[Bar]:
    if until_s - since_s > _LEAST_WAIT * total_s:
        yield Bar(WAIT, since_s, until_s - since_s)


def _bar(phase: Phase) -> Bar:
    start_s = seconds(phase.start)
    stages = sorted((_stage_bar(stage, start_s) for stage in phase.stages), key=lambda bar: -bar.length_s)
    slowest = max(phase.stages, key=lambda stage: seconds(stage.duration), default=None)
    moved_bytes, length_s = sum(bar.moved for bar in stages), seconds(phase.duration)
    notes = sorted({note for bar in stages for note in bar.note.split(", ") if note})
    if phase.running:
        notes = ["running", *notes]
    return Bar(
        _name(phase),
        start_s,
        length_s,
        last=f"{slowest.slot} rank {slowest.slowest_rank}" if slowest is not None else "",
        moved=moved_bytes,
        rate=moved_bytes / length_s if moved_bytes and length_s else 0.0,
        note=", ".join(notes),
        stages=tuple(stages),
    )


def _name(phase: Phase) -> str:
    return values.name_of(PhaseKind.DESCRIPTOR, phase.kind).lower()


def _stage_bar(stage: StagePhase, start_s: float) -> Bar:
    moved_bytes = sum(rank.bytes for rank in stage.ranks)
    busy_s = max((seconds(rank.transfer) + seconds(rank.load) for rank in stage.ranks), default=0.0)
    outcome = values.name_of(Outcome.DESCRIPTOR, stage.outcome)
    notes = [outcome] if outcome != "APPLIED" else []
    if stage.failed_level:
        notes.append(f"failed {values.name_of(VerificationLevel.DESCRIPTOR, stage.failed_level)}")
    if stage.transport:
        notes.append(values.name_of(Transport.DESCRIPTOR, stage.transport).lower())
    ranks = tuple(
        Bar(
            f"rank {rank.rank}",
            start_s,
            seconds(rank.transfer) + seconds(rank.load),
            moved=rank.bytes,
            rate=rank.bytes / seconds(rank.transfer) if seconds(rank.transfer) else 0.0,
        )
        for rank in stage.ranks
    )
    return Bar(
        stage.slot,
        start_s,
        seconds(stage.duration),
        last=f"rank {stage.slowest_rank}",
        moved=moved_bytes,
        rate=moved_bytes / busy_s if busy_s else 0.0,
        note=", ".join(notes),
        stages=ranks,
    )


def _drawn(bar: Bar, total_s: float) -> str:
    """Draw dots for the time before and after, blocks for the bar: at least a single block."""
    first = min(round(WIDTH * bar.start_s / total_s), WIDTH - 1)
    length = max(1, min(round(WIDTH * bar.length_s / total_s), WIDTH - first))
    return "." * first + ("~" if bar.name == WAIT else "#") * length + "." * (WIDTH - first - length)


def _row(bar: Bar, total_s: float, most: int, level: int = 0) -> str:
    offset, width = 100 * bar.start_s / total_s, max(0.2, 100 * bar.length_s / total_s)
    kind = WAIT if bar.name == WAIT else f"level{level}"
    cells = [
        bar.name,
        values.elapsed(bar.length_s),
        f"last {bar.last}" if bar.last else "",
        size(bar.moved) if bar.moved else "",
        f"{size(round(bar.rate))}/s" if bar.rate else "",
        bar.note,
    ]
    name, *facts = map(_text, cells)
    line = (
        f'<span class="name">{name}</span><span class="track">'
        f'<i class="{kind}" style="left:{offset:.2f}%;width:{width:.2f}%"></i></span>'
        f'<span class="facts">{" · ".join(filter(None, facts))}</span>'
    )
    if not bar.stages:
        return f'<div class="row level{level}">{line}</div>'
    below = "".join(_row(each, total_s, most, level + 1) for each in bar.stages[:most])
    if len(bar.stages) > most:
        below += f"<p>{len(bar.stages) - most} more: rlctl describe operation ID --html FILE</p>"
    return f'<details class="level{level}"><summary class="row">{line}</summary>{below}</details>'


def _text(value: str) -> str:
    return html.escape(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root{{color-scheme:light dark;--line:#8884}}
body{{font:14px/1.5 system-ui,sans-serif;margin:1.5rem auto;max-width:70rem;padding:0 1rem}}
h1{{font-size:1.3rem}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:0 1rem;margin:0 0 1.5rem}}
dt{{opacity:.7}}dd{{margin:0;overflow-wrap:anywhere}}
.row{{display:grid;grid-template-columns:9rem minmax(8rem,1fr) minmax(9rem,24rem);
 gap:.75rem;align-items:center;padding:.15rem 0;border-bottom:1px solid var(--line)}}
summary.row{{cursor:pointer}}summary .name::before{{content:"▸ "}}details[open]>summary .name::before{{content:"▾ "}}
.level1 .name{{padding-left:1rem}}.level2 .name{{padding-left:2rem}}
.track{{position:relative;height:.9rem;background:var(--line);border-radius:2px}}
.track i{{position:absolute;top:0;bottom:0;border-radius:2px}}
i.level0{{background:#2f6fde}}i.level1{{background:#3fa7a0}}i.level2{{background:#8a7bd8}}i.wait{{background:#d59b2d}}
.facts{{overflow-wrap:anywhere}}
@media(max-width:40rem){{.row{{grid-template-columns:7rem 1fr}}.facts{{grid-column:1/-1}}}}
</style></head><body><h1>{title}</h1><dl>{facts}</dl>
<p>The bars span {end}. Open a phase for its stages, a stage for its ranks.</p>
{rows}
</body></html>
"""
