"""A launcher with simulated processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import EngineSpec, Reservation, rank_arguments


class Child:
    """A process controlled by the test."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.facts: dict[str, str] = {}
        self.pid = 1
        self.log = Path(f"/logs/{name}.log")
        self.last = ""
        self.returncode: int | None = None

    def last_log_line(self) -> str:
        return self.last

    def log_lines(self) -> list[str]:
        return ["loading", "no memory"]

    @property
    def serves(self) -> bool:
        return bool(self.facts)

    def announce(self) -> None:
        self.facts = {"address": f"at {self.name}", "rollout_address": "r"}

    def announced(self, timeout_s: float) -> dict[str, str]:
        return self.facts

    def failure(self) -> RlctlError:
        return Reason.ENGINE_FAILED.error(f"{self.name} ended with {self.returncode}")

    def terminate(self) -> None:
        self.returncode = self.returncode if self.returncode is not None else 0

    kill = terminate

    def wait(self, timeout_s: float = 0, killed_s: float = 0) -> bool:
        return False


class Children:
    """A launcher of such processes."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> Child:
        self.all.append(Child(spec.process(rank), rank_arguments(spec, rank, coordinator, followers)))
        return self.all[-1]

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        pass

    def close(self) -> None:
        pass
