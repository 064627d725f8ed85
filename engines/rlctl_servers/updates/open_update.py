"""The open update of an engine, and the check whether a call belongs to it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from rlctl.contract.errors import Reason
from rlctl.engine import Call


class HasUpdateId(Protocol):
    """An update that is open."""

    update_id: str


Open = TypeVar("Open", bound=HasUpdateId)


def opened(update: Open | None, call: Call) -> Open:
    """Return the open update if the call belongs to it. Raises UPDATE_NOT_FOUND, UPDATE_FENCED."""
    if update is None:
        raise Reason.UPDATE_NOT_FOUND.error(f"update {call.update_id or '(none)'} is not open at this engine")
    if update.update_id != call.update_id:
        raise Reason.UPDATE_FENCED.error(
            f"update {update.update_id} is open, the command belongs to {call.update_id or 'none'}",
            field="header.fence.update_id",
        )
    return update
