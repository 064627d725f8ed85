"""Reports of refused calls, at a limited rate: no caller can fill a log or a journal with refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from rlctl.contract.access import Method
from rlctl.contract.errors import RlctlError
from rlctl.contract.scopes import Identity

log = logging.getLogger(__name__)

EVERY_S = 60.0
"""Time in which equal refusals after the first are counted and reported together."""

MOST_KINDS = 256
"""Kinds of refusals that are distinguished within that time. All further refusals are one kind."""

Later = Callable[[float, Callable[[], None]], object]


@dataclass(frozen=True)
class Denial:
    """Equal refusals: one caller, one method, one reason.

    All unauthenticated callers of one host are one caller, for all methods: a caller without a token could otherwise
    make any number of kinds.

    Attributes:
        identity: None: the caller was not authenticated.
        method: of the last call. As ``error``.
        host: the caller's host, without the TCP port.
        count: number of calls.
    """

    identity: Identity | None
    host: str
    method: str
    error: RlctlError
    count: int = 1


class Denials:
    """Reports the first refusal of a kind at once, and the refusals of the following minute together."""

    def __init__(self, report: Callable[[Denial], None] | None = None, later: Later | None = None) -> None:
        """``report``: called beside the log. ``later``: the running loop's ``call_later``."""
        self._report = report
        self._later = later
        self._open: dict[tuple[str, ...], Denial | None] = {}
        """Refusals since the first of each kind."""

    def note(self, identity: Identity | None, method: Method, error: RlctlError, host: str) -> None:
        """Count a refusal, and report the first of a kind."""
        denial = Denial(identity, host, method.name, error)
        kind: tuple[str, ...] = ("", host)
        if identity is not None:
            kind = (identity.principal.name, host, method.name, error.reason.name)
        if kind not in self._open and len(self._open) >= MOST_KINDS:
            kind = ()
        if kind in self._open:
            before = self._open[kind]
            self._open[kind] = dataclasses.replace(denial, count=1 + (before.count if before is not None else 0))
            return
        self._open[kind] = None
        call_later = self._later or asyncio.get_running_loop().call_later
        call_later(EVERY_S, lambda: self._end(kind))
        self._tell(denial)

    def _end(self, kind: tuple[str, ...]) -> None:
        denial = self._open.pop(kind)
        if denial is not None:
            self._tell(denial)

    def _tell(self, denial: Denial) -> None:
        calls = f"{denial.count} further calls of " if denial.count > 1 else ""
        if calls and denial.identity is None:
            calls = f"{denial.count} further calls without authentication, the last of "
        log.warning("%s%s from %s denied: %s", calls, denial.method, denial.host or "an unknown host", denial.error)
        if self._report is not None:
            self._report(denial)
