"""The interface of launchers, which decide where processes run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlctl.contract.errors import RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation


class Launched(Protocol):
    """A started server, on any machine."""

    name: str
    facts: dict[str, str]
    """The announced address, rollout_address and pid; empty before the announcement."""

    @property
    def pid(self) -> int:
        """Process id on the server's machine."""

    @property
    def log(self) -> Path:
        """Path of the log, for people."""

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the server runs."""

    @property
    def serves(self) -> bool:
        """Whether the server has announced its address."""

    def announced(self, timeout_s: float) -> dict[str, str]:
        """Wait for the facts. Raises ENGINE_FAILED, DEADLINE_EXCEEDED."""

    def last_log_line(self) -> str:
        """Return the last line of the log; "" without a line or without access from here."""

    def log_lines(self) -> list[str]:
        """Return the last lines of the log; [] without access from here."""

    def failure(self) -> RlctlError:
        """Return the error that says why the server ended."""

    def terminate(self) -> None:
        """Ask the server to end; the server then leaves the fleet in order."""

    def kill(self) -> None: ...

    def wait(self, timeout_s: float = ..., killed_s: float = ...) -> bool:
        """Wait for the end, with a kill after the time; returns whether the kill was needed.

        ``killed_s``: limit of the wait after the kill. A server that still runs then has no returncode.
        """


class Launcher(Protocol):
    """Starts the servers of engines. No server outlives the launcher's process."""

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> Launched:
        """Start the server of one rank, without waiting. ``followers``: addresses of the other ranks, for rank 0.

        All processes of an engine must have ended before any of them is launched again.
        """

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Keep empty room for placeholders, before engines start, and give back the room of removed placeholders.

        Raises PLACE_UNAVAILABLE; FIELD_INVALID if the engines do not fit.
        """

    def close(self) -> None:
        """Give back all reserved room, after the end of every process."""
