"""Serving leases of replaced processes. Such a process may still run behind a network partition, and serves until its
lease ends.

Leases are kept by model, because the process that fills the slot now may serve another model.
"""

from __future__ import annotations

from rlctl.v1.common_pb2 import Target


class Formers:
    """Times are on the clock's ``now``."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str, str], float] = {}
        """By address, model and slot."""

    def add(self, address: str, model: str, until: float, now: float, slot: str = "") -> None:
        """What served a model at an address was replaced; it may still serve no later than ``until``.

        ``slot``: the one that it filled; "" where that is not known.
        """
        self._until = {key: other for key, other in self._until.items() if other > now}
        key = address, model, slot
        self._until[key] = max(until, self._until.get(key, until))

    def gone(self, address: str) -> None:
        """Something else listens at an address now."""
        self._until = {key: until for key, until in self._until.items() if key[0] != address}

    def until(self, model: str) -> float:
        """No later than this one of them may still be serving a model."""
        return max((until for (_, served, _), until in self._until.items() if served == model), default=float("-inf"))

    def meant(self, target: Target) -> float:
        """No later than this one of them may still be serving that filled a slot which a target means."""
        untils = (
            until
            for (_, model, slot), until in self._until.items()
            if target.model in ("", model) and (not target.slots or slot in ("", *target.slots))
        )
        return max(untils, default=float("-inf"))
