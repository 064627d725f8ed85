"""What filled slots before and may be alive, only cut off: those who still reach it are served while its lease lasts.

By model and not by slot: what fills the slot now may serve another model.
"""

from __future__ import annotations


class Formers:
    """Times are on the clock's ``now``."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}
        """By address and model."""

    def add(self, address: str, model: str, until: float, now: float) -> None:
        """Something that served a model at an address was replaced; it may still serve no later than ``until``."""
        self._until = {key: other for key, other in self._until.items() if other > now}
        self._until[address, model] = max(until, self._until.get((address, model), until))

    def gone(self, address: str) -> None:
        """Something else listens at an address now."""
        self._until = {key: until for key, until in self._until.items() if key[0] != address}

    def until(self, model: str) -> float:
        """No later than this one of them may still be serving a model."""
        return max((until for (_, served), until in self._until.items() if served == model), default=float("-inf"))
