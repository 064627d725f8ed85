"""Parses records of the journal. A damaged record is an error of its own: neither absent nor a defect of rlctl."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from rlctl.contract.errors import Reason

M = TypeVar("M", bound=Message)

NEXT_STEP = (
    "Put a copy of the journal back, or move the file and those named like it away to begin without records; then"
    " restart the stages, which obey no older epoch."
)


def parsed(kind: str, key: str, body: bytes, record: type[M]) -> M:
    """Parse a record of the journal. Raises JOURNAL_FAILED for a damaged record."""
    try:
        return record.FromString(body)
    except DecodeError as error:
        raise Reason.JOURNAL_FAILED.error(
            f"the journal's {kind} record {key!r} is damaged: {error}", next_step=NEXT_STEP
        ) from None
