"""Serving leases of replaced processes. Such a process may run behind a network partition, and serves until its lease
ends.

Leases are kept by model, because the process that fills the slot now may serve a different model.
"""

from __future__ import annotations

from rlctl.v1.common_pb2 import Target


class Formers:
    """Ends of the leases, on the clock's ``now``."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str, str], float] = {}

    def add(self, address: str, model: str, until: float, now: float, slot: str = "") -> None:
        """Record that a replaced process may serve a model until a time. ``slot``: its slot, "" if unknown."""
        self._until = {key: end for key, end in self._until.items() if end > now}
        key = address, model, slot
        self._until[key] = max(until, self._until.get(key, until))

    def forget(self, address: str) -> None:
        """Forget the process at an address that a new process listens at."""
        self._until = {key: until for key, until in self._until.items() if key[0] != address}

    def until(self, model: str) -> float:
        """Return the latest time at which a replaced process may still serve a model."""
        return max((until for (_, served, _), until in self._until.items() if served == model), default=float("-inf"))

    def until_of_target(self, target: Target) -> float:
        """Return the latest time at which a replaced process of a target may still serve."""
        ends = (
            until
            for (_, model, slot), until in self._until.items()
            if target.model in ("", model) and (not target.slots or slot in ("", *target.slots))
        )
        return max(ends, default=float("-inf"))
