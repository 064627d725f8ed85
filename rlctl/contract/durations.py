"""Seconds and protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from rlctl.contract.errors import Reason

LONGEST_S = 315_576_000_000
"""Ten thousand years, the longest protobuf duration."""


def duration(seconds: float) -> Duration:
    """Return a protobuf duration. Raises DEADLINE_INVALID for infinity, NaN and more than LONGEST_S."""
    message = Duration()
    set_duration(message, seconds)
    return message


def set_duration(target: Duration, seconds: float) -> None:
    """Set a duration in place. In a field of every command, a copy would cost more than the rest."""
    if not abs(seconds) <= LONGEST_S:
        raise Reason.DEADLINE_INVALID.error(f"{seconds:g} s is no time that can be told")
    whole_seconds = int(seconds)
    target.seconds, target.nanos = whole_seconds, round((seconds - whole_seconds) * 1e9)


def seconds(value: Duration) -> float:
    """Return the seconds of a duration; 0.0 if unset."""
    return value.seconds + value.nanos / 1e9


def add_seconds(total: Duration, more: float) -> None:
    nanos = total.nanos + round(more * 1e9)
    total.seconds += nanos // 10**9
    total.nanos = nanos % 10**9
