"""The incarnation of a trainer that starts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet


def next_incarnation(fleet: Fleet, model: str) -> int:
    """Return a number above those of all earlier trainers of a model.

    The wall clock alone would not do: a trainer on a host with a slower clock would be refused as an earlier one. The
    model's number alone would not do: an earlier trainer without an update has left none.
    """
    present = max((each.trainer_incarnation for each in fleet.status().models if each.name == model), default=0)
    return max(int(time.time()), present + 1)
