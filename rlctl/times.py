"""Seconds and protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """A duration of so many seconds."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))


def seconds(value: Duration) -> float:
    """Seconds of a duration; 0.0 for an unset one."""
    return value.seconds + value.nanos / 1e9
