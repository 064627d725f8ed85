"""Rounds: the product and its peers take turns, so that other load of the machine affects all sides alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a figure over its rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


def interleaved(rounds: int, sides: Mapping[str, Callable[[], T]], *, warm_up: int = 1) -> dict[str, list[T]]:
    """Run every side ``warm_up`` times unmeasured, then all sides in each round, in rotating order.

    Returns the results by side, in the order of the rounds.
    """
    for _ in range(warm_up):
        for run in sides.values():
            run()
    order = list(sides)
    results: dict[str, list[T]] = {name: [] for name in order}
    for _ in range(rounds):
        for name in order:
            results[name].append(sides[name]())
        order = [*order[1:], order[0]]
    return results


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of ``above / below``, round by round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def median(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)
