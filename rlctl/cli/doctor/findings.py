"""The findings of checks: the observed state, its severity and the next step."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """The result of a check for a subject.

    Attributes:
        seen: observed state.
        mend: the next step; "" for an ok subject.
    """

    check: str
    subject: str
    verdict: Verdict
    seen: str
    mend: str = ""


def ok(check: str, subject: str, seen: str) -> Finding:
    return Finding(check, subject, Verdict.OK, seen)


def warning(check: str, subject: str, seen: str, mend: str) -> Finding:
    """Return a finding about a subject that works, or may not work for every user."""
    return Finding(check, subject, Verdict.WARNING, seen, mend)


def failure(check: str, subject: str, seen: str, mend: str) -> Finding:
    """Return a finding about a subject that does not work."""
    return Finding(check, subject, Verdict.FAILURE, seen, mend)


def size(number: float) -> str:
    """Return bytes in readable units: 64 MiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB" if number < 1000 else f"{number:.0f} GiB"
