"""A coordinator and many stages without engines, in separate processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rlctl.launch.local.child_processes import Process, stop_all
from rlctl.sdk.blocking import Fleet, connect
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from tools.benchmark import null_stages

START_S = 180.0
STAGES_PER_PROCESS = 256


class NullFleet:
    """``with NullFleet(directory, stages=64, ranks=1) as fleet``: every stage is routable inside the block."""

    def __init__(self, directory: Path, *, stages: int, ranks: int, metrics: str = "", mtls: bool = False) -> None:
        """``directory``: for journal and logs; made if missing. ``metrics``: address of its metrics.

        ``mtls``: every hop has TLS, and every process a certificate of its own.
        """
        self._metrics = ["--metrics", metrics] if metrics else []
        self._tls = directory / "tls" if mtls else None
        self.directory = directory
        self.stages = stages
        self.ranks = ranks
        self.address = "127.0.0.1:0"
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._tls is not None:
            Authority.init(self._tls, "null")
        try:
            self.start_coordinator()
            self.address = self.coordinator.announced(START_S)["address"]
            for first in range(0, self.stages, STAGES_PER_PROCESS):
                count = min(STAGES_PER_PROCESS, self.stages - first)
                where = ("--coordinator", self.address, "--first", str(first))
                size = ("--stages", str(count), "--ranks", str(self.ranks), "--tls", str(self._tls or ""))
                self._spawn(f"stages-{first}", [*where, *size], null_stages.__name__)
            for process in self._processes[1:]:
                process.announced(START_S)
            with self.connect() as fleet:
                until_routable(fleet, self.stages)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start_coordinator(self) -> None:
        """Start the coordinator, at its earlier address and on its journal, without waiting."""
        arguments = ["coordinator", "--listen", self.address, "--journal", str(self.directory / "journal.db")]
        arguments += self._metrics
        files = None if self._tls is None else Authority(self._tls).issue("coordinator")
        self.coordinator = self._spawn("coordinator", arguments, environment=files.variables if files else {})

    def kill_coordinator(self) -> None:
        """Kill the coordinator."""
        self.coordinator.kill()
        self.coordinator.wait()
        self._processes.remove(self.coordinator)

    def connect(self) -> Fleet:
        """Return a client of the fleet."""
        if self._tls is None:
            return connect(self.address)
        return connect(self.address, tls=Tls(Authority(self._tls).issue("client/benchmark")))

    def _spawn(
        self, name: str, arguments: Sequence[str], module: str = "rlctl", environment: Mapping[str, str] | None = None
    ) -> Process:
        process = Process(name, arguments, self.directory / f"{name}.log", environment or {}, module)
        self._processes.append(process)
        return process

    def _stop(self) -> None:
        # Stages first, so that no stage looks for a stopped coordinator.
        stop_all([process for process in self._processes if process is not self.coordinator])
        stop_all([self.coordinator])


def until_routable(fleet: Fleet, stages: int) -> None:
    """Wait until ``stages`` stages are routable."""
    routable: dict[str, bool] = {}
    for event in fleet.watch():
        routable |= {stage.registration.slot: stage.routable for stage in event.fleet.stages}
        if sum(routable.values()) >= stages:
            return
    raise AssertionError("the watch ended")
