"""Seconds and protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from rlctl.contract.errors import Reason

LONGEST_S = 315_576_000_000
"""Ten thousand years: a protobuf duration is no longer."""


def duration(seconds: float) -> Duration:
    """A duration of so many seconds. Raises DEADLINE_INVALID for infinity, NaN and what no duration is as long as."""
    made = Duration()
    set_duration(made, seconds)
    return made


def set_duration(target: Duration, seconds: float) -> None:
    """The same in place: of what every command carries, a copy would cost more than the rest."""
    if not abs(seconds) <= LONGEST_S:
        raise Reason.DEADLINE_INVALID.error(f"{seconds:g} s is no time that can be told")
    whole = int(seconds)
    target.seconds, target.nanos = whole, round((seconds - whole) * 1e9)


def seconds(value: Duration) -> float:
    """Seconds of a duration; 0.0 for an unset one."""
    return value.seconds + value.nanos / 1e9
