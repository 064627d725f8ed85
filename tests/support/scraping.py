"""Reads metrics like Prometheus."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of a scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels; 0.0 without samples."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label."""
        return {sample.labels[label] for sample in self._samples if sample.name == name}


async def scrape(address: str) -> Scrape:
    """Return the metrics served at an address."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    return Scrape(await asyncio.to_thread(read))
