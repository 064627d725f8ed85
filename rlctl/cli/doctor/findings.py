"""What a check has found, and how to mend it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """The result of a check for one subject.

    Attributes:
        check: name of the check.
        subject: what was looked at.
        verdict: how bad it is.
        seen: what was seen there.
        mend: the next step; "" where the subject is ok.
    """

    check: str
    subject: str
    verdict: Verdict
    seen: str
    mend: str = ""


def ok(check: str, subject: str, seen: str) -> Finding:
    """Nothing to do."""
    return Finding(check, subject, Verdict.OK, seen)


def warning(check: str, subject: str, seen: str, mend: str) -> Finding:
    """It works, or may not work for everybody."""
    return Finding(check, subject, Verdict.WARNING, seen, mend)


def failure(check: str, subject: str, seen: str, mend: str) -> Finding:
    """It does not work."""
    return Finding(check, subject, Verdict.FAILURE, seen, mend)


def size(number: float) -> str:
    """Bytes as people read them: 64 MiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB" if number < 1000 else f"{number:.0f} GiB"
