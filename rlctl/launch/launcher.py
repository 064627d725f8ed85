"""Where processes run: the one interface that a launcher implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlctl.errors import RlctlError


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

    def failure(self) -> RlctlError:
        """Why it ended."""

    def terminate(self) -> None:
        """Ask it to end; it leaves the fleet in order."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float = ...) -> bool:
        """Wait until it has ended, killing it when that takes longer; returns whether that was needed."""


class Launcher(Protocol):
    """Starts servers. None outlives the launcher's process."""

    def launch(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], *, gpus: Sequence[int], cpus: int
    ) -> Launched:
        """Start ``rlctl ARGUMENTS``; does not wait.

        ``gpus``: GPUs of the plan that it is placed by; ``cpus``: cores that it is bound to, 0 for none in particular.
        """
