"""JSON that lies beside weights: configs, indices, manifests."""

from __future__ import annotations

import json
from typing import Any


def parse(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError when it is none, holds NaN, or is nested too deep to be read.

    Python reads NaN although JSON has none. It equals nothing, itself included: a config that holds it fits no other,
    not even a copy, so that a checkpoint with it could be published and then never be loaded. Infinity passes: some
    models' configs have it.
    """
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN, which is no JSON")
    return float(name)
