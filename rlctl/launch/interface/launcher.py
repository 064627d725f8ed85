"""Where processes run: the one interface that a launcher implements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlctl.contract.errors import RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation


class Launched(Protocol):
    """A server that was started, wherever it runs."""

    name: str
    facts: dict[str, str]
    """What it announced: address, rollout_address, pid; empty until it has."""

    @property
    def pid(self) -> int:
        """Its process id, where it runs."""

    @property
    def log(self) -> Path:
        """Where its log is, for people."""

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""

    @property
    def serves(self) -> bool:
        """Whether it has announced itself."""

    def announced(self, timeout_s: float) -> dict[str, str]:
        """Wait for the facts. Raises ENGINE_FAILED, DEADLINE_EXCEEDED."""

    def said(self) -> str:
        """The last line that it has logged; "" where there is none, or that cannot be read from here."""

    def log_lines(self) -> list[str]:
        """The last lines that it has logged; [] where they cannot be read from here."""

    def failure(self) -> RlctlError:
        """Why it ended."""

    def terminate(self) -> None:
        """Ask it to end; it leaves the fleet in order."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float = ...) -> bool:
        """Wait until it has ended, killing it when that takes longer; returns whether that was needed."""


class Launcher(Protocol):
    """Starts the servers of engines. None outlives the launcher's process."""

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> Launched:
        """Start the server of one rank; does not wait. ``followers``: where the others are, for rank 0.

        All processes of an engine have ended before one of them is launched again.
        """

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Before engines are started: keep room for placeholders, in which nothing is; what is not named any more is
        given back. Raises PLACE_UNAVAILABLE; FIELD_INVALID where the engines cannot be put where they are to be.
        """

    def close(self) -> None:
        """Give back what is held; every process has ended."""
