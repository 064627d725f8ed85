"""The lowest version at which a stage may generate further tokens of a sample."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rlctl.contract.errors import Reason
from rlctl.v1.fleet_pb2 import Model


@dataclass(frozen=True)
class Admission:
    """A bound on the version of new tokens. Stages serve admitted versions only, with any bound.

    Attributes:
        kind: "latest": every version admitted now, including both versions of a rolling update; "any": no bound;
            "max_staleness": at most ``staleness`` sequence numbers behind the latest version.
    """

    kind: Literal["latest", "any", "max_staleness"] = "latest"
    staleness: int = 0

    def floor(self, model: Model | None, min_version: int = 0) -> int:
        """Return the lowest sequence of a suitable stage. ``model`` is None if unknown."""
        if model is None or self.kind == "any":
            return min_version
        latest = model.latest.sequence
        if self.kind == "max_staleness":
            return max(min_version, latest - self.staleness)
        return max(min_version, min((version.sequence for version in model.admitted), default=latest))


def max_staleness(versions: int) -> Admission:
    """Admit versions at most this far behind the latest. Raises FIELD_INVALID for a negative number."""
    if versions < 0:
        raise Reason.FIELD_INVALID.error(f"max_staleness is {versions}; it must be 0 or more", field="admission")
    return Admission("max_staleness", versions)


def parse(value: str | Admission) -> Admission:
    """Parse "latest", "any" or "max_staleness=2". Raises FIELD_INVALID."""
    if isinstance(value, Admission):
        return value
    if value == "latest":
        return Admission()
    if value == "any":
        return Admission("any")
    if match := re.fullmatch(r"max_staleness=(\d+)", value):
        return max_staleness(int(match[1]))
    raise Reason.FIELD_INVALID.error(
        f"admission is {value!r}; it must be latest, any or max_staleness=VERSIONS", field="admission"
    )
