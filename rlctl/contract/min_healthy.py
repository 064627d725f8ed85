"""The number of stages of a model that voluntary disruptions leave routable: ``2`` or ``50%``."""

from __future__ import annotations

import re

from rlctl.contract.errors import Reason
from rlctl.v1.fleet_pb2 import MinHealthy

MOST_STAGES = 1_000_000


def parse(text: str, field: str = "min_healthy") -> MinHealthy:
    """Return the limit of ``2``, ``50%`` or ``0`` (no limit). Raises FIELD_INVALID."""
    match = re.fullmatch(r"(\d{1,7})(%?)", text, re.ASCII)
    number = int(match[1]) if match is not None else -1
    if match is None or number > (100 if match[2] else MOST_STAGES):
        raise Reason.FIELD_INVALID.error(f"{field} is {text!r}; it must be a number or 0% to 100%", field=field)
    return MinHealthy() if not number else MinHealthy(percent=number) if match[2] else MinHealthy(stages=number)


def words(minimum: MinHealthy) -> str:
    """Return the text of a limit, as :func:`parse` reads it; "" without a limit."""
    if minimum.percent:
        return f"{minimum.percent}%"
    return str(minimum.stages) if minimum.stages else ""


def limit(minimum: MinHealthy, stage_count: int) -> int:
    """Return the limit in stages, of a model with ``stage_count`` stages. A share is rounded up. 0: no limit."""
    return -(-minimum.percent * stage_count // 100) if minimum.percent else minimum.stages
