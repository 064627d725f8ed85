"""fan_out: one recorded admin verb to many stages, with and without metrics of the coordinator."""

from __future__ import annotations

from tools.benchmark import fleet_pairs
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.metrics.scraper import scraped


def measure(setting: Setting) -> Reading:
    """Measure two fleets in turns."""
    return fleet_pairs.measure(
        setting,
        "metrics",
        metrics="127.0.0.1:0",
        during=lambda null: scraped([null.coordinator.facts["metrics_address"]]),
    )
