"""The dashboard and the alert rules of examples/monitoring name only metrics and labels that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.metrics.definitions import METRICS, Metric

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
OF_PROMETHEUS = {"job", "instance", "le"}
SELECTOR = re.compile(r"\b(rlctl_\w+|up)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def series(metric: Metric) -> list[str]:
    suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
    return [f"{metric.name}{suffix}" for suffix in suffixes]


SERIES = {name: metric for metric in METRICS for name in series(metric)}


def expressions(node: Any) -> Iterator[str]:
    """Every ``expr`` below, wherever it stands."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "expr")
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from expressions(each)


DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
ALERTS = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
EXPRESSIONS = sorted({*expressions(DASHBOARD), *expressions(ALERTS)})


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    found = SELECTOR.findall(expression)
    assert found
    labels = set(OF_PROMETHEUS)
    for name, matchers in found:
        own = {*OF_PROMETHEUS, *(SERIES[name].labels if name != "up" else ())}
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= own
        labels |= own
    grouped = {label.strip() for labels in GROUPED.findall(expression) for label in labels.split(",")}
    assert grouped <= labels


def test_the_dashboard_shows_every_metric_of_rlctl() -> None:
    shown = {SERIES[name].name for each in expressions(DASHBOARD) for name, _ in SELECTOR.findall(each)}
    # The state of a stage is in the table of `rlctl status`; the dashboard counts states.
    hidden = {"rlctl_stage_state", "rlctl_generation_duration_seconds", "rlctl_serving_version"}
    hidden |= {"rlctl_gateway_inflight_bytes", "rlctl_gateway_tokens_total"}
    assert shown == {metric.name for metric in METRICS} - hidden


def test_an_alert_says_what_to_do() -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "action"}, rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("command", [["check", "rules", "alerts.yaml"], ["check", "config", "prometheus.yaml"]])
def test_promtool_accepts_the_files(command: list[str]) -> None:
    place = subprocess.run([ROOT / "tools" / "prometheus", "path"], capture_output=True, text=True, check=False)
    if place.returncode:
        pytest.skip("Prometheus is not installed here: tools/prometheus install")
    promtool = Path(place.stdout.strip()) / "promtool"
    done = subprocess.run([promtool, *command], cwd=MONITORING, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_name_is_used_once_and_ends_in_its_unit() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds"), metric.name
            assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        # An id, a version or the name of an adapter would make a series for each value that there ever was. Principals
        # with a quota are those of the access file.
        assert set(metric.labels) <= {
            "level", "loop", "method", "model", "outcome", "phase", "principal", "reason", "route", "slot", "state",
            "status", "transport", "verb",
        }, metric.name  # fmt: skip
