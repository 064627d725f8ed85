"""docs/reference/metrics.md: every metric of the table."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.metrics.definitions import COORDINATOR, GATEWAY, METRICS, STAGE, Metric
from tools.reference.markdown import prose, table

_ABOUT = """\
A coordinator, stage server or gateway with `--metrics HOST:PORT` serves these metrics at `http://HOST:PORT/metrics`
([metrics](../metrics.md)). Names, types and labels are stable within a major version. A histogram has the series
`NAME_bucket`, `NAME_sum` and `NAME_count`.

The label `verb` has verbs and updates of the contract, `reason` has [reasons](errors.md), `model` and `slot` have names
of the topology. States, phases, levels and transports are the enums of the contract in lower case, without their
prefix.

Each process also has the metrics of prometheus_client about itself: `process_cpu_seconds_total`,
`process_resident_memory_bytes`, `process_open_fds`, `process_max_fds`, `process_start_time_seconds`,
`process_virtual_memory_bytes` and `python_info`.
"""


def page() -> Iterator[str]:
    """Yield the metrics of each kind of process."""
    yield "# Metrics\n"
    yield from prose(_ABOUT)
    yield from _section("Every process", [metric for metric in METRICS if len(metric.processes) > 1])
    for process, title in ((COORDINATOR, "Coordinator"), (STAGE, "Stage server"), (GATEWAY, "Gateway")):
        yield from _section(title, [metric for metric in METRICS if metric.processes == (process,)])


def _section(title: str, metrics: list[Metric]) -> Iterator[str]:
    yield f"## {title}\n"
    rows = [
        [f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help]
        for metric in metrics
    ]
    yield from table(["metric", "type", "labels", "meaning"], rows)
