"""A fleet of processes on this machine: a coordinator, and for every engine its ranks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rlctl.client.fleet import Fleet, connect
from rlctl.engine import brings_ranks
from rlctl.errors import Reason, RlctlError
from rlctl.launch.processes import STOP_S, Process, stop_all

START_S = 300.0
READY_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start.

    Attributes:
        slot: stable name, "actor-0".
        model_path: directory of its checkpoint.
        model: model that it serves.
        engine: plug-in.
        tp_size: ranks.
        device: "cpu", or "cuda": then the ranks of a fleet take this machine's GPUs in order, one each.
        options: the plug-in's settings.
        environment: additional environment variables of its ranks.
        frozen: the model receives no weights.
    """

    slot: str
    model_path: str
    model: str = "actor"
    engine: str = "torch"
    tp_size: int = 1
    device: str = "cpu"
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False


def _followers(spec: EngineSpec) -> range:
    """Ranks that are processes of ours beside rank 0."""
    return range(1, 1 if brings_ranks(spec.engine) else spec.tp_size)


def interrupted(processes: int) -> str:
    """What a launcher says when somebody wants the end."""
    return f"interrupted; taking {processes} process{'es' if processes != 1 else ''} down"


class LocalFleet:
    """Starts and stops the processes of a fleet. As a context manager it is up inside the block.

    Nothing outlives this process: children end when it does.
    """

    def __init__(
        self,
        engines: Sequence[EngineSpec],
        *,
        directory: Path | None = None,
        listen: str = "127.0.0.1:0",
        token: str | None = None,
        insecure: bool = False,
        on_progress: Callable[[str], None] = lambda _: None,
        module: str = "rlctl",
    ) -> None:
        """``directory``: where the journal and the logs go; a temporary one if None.

        ``on_progress`` is told what happens, a line each. ``module``: what the processes run in place of ``rlctl``;
        it must do what that does, and may do more.
        """
        self.engines = list(engines)
        self.address = ""
        self.processes: list[Process] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="rlctl-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary else Path(str(directory))
        self._listen = listen
        self._token = token
        self._insecure = insecure
        self._say = on_progress
        self._module = module

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._tell_of_interrupt(error)
        self.stop()

    def start(self) -> str:
        """Start everything and wait until every stage is routable; returns the coordinator's address.

        Raises ENGINE_FAILED or DEADLINE_EXCEEDED, naming the process, the cause and its log; then all are stopped.
        """
        try:
            self._start()
        except BaseException as error:
            self._tell_of_interrupt(error)
            self.stop()
            raise
        return self.address

    def stop(self) -> None:
        """End every process: engines first, while there is a coordinator that they can take leave of."""
        engines = [process for process in self.processes if process.name != "coordinator"]
        for process in [*stop_all(engines), *stop_all(self.processes)]:
            self._say(
                f"{process.name} (pid {process.pid}) did not end in {STOP_S:g} s and was killed; see {process.log}"
            )
        self.processes.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _tell_of_interrupt(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception):
            self._say(interrupted(len(self.processes)))

    def connect(self) -> Fleet:
        """A client of the fleet."""
        return connect(self.address, token=self._token)

    def process(self, name: str) -> Process:
        """One of the processes: "coordinator", "actor-0" (rank 0), "actor-0.1" (rank 1)."""
        return next(process for process in self.processes if process.name == name)

    def restart(self, slot: str) -> None:
        """End what is left of an engine, and start it again as it was launched; returns when its server answers.

        Raises ENGINE_FAILED or DEADLINE_EXCEEDED, naming the process, the cause and its log.
        """
        spec = next(spec for spec in self.engines if spec.slot == slot)
        names = [slot, *(f"{slot}.{rank}" for rank in _followers(spec))]
        old = [process for process in self.processes if process.name in names]
        stop_all(old)
        self.processes = [process for process in self.processes if process not in old]
        followers = [self._rank(spec, rank) for rank in _followers(spec)]
        self._rank(spec, 0, [process.announced(START_S)["address"] for process in followers]).announced(START_S)

    def _start(self) -> None:
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        coordinator = self._spawn(
            "coordinator",
            ["coordinator", "--listen", self._listen, "--journal", str(self.directory / "journal.db")],
        )
        self.address = coordinator.announced(START_S)["address"]
        self._say(f"coordinator at {self.address}")
        followers = {spec.slot: [self._rank(spec, rank) for rank in _followers(spec)] for spec in self.engines}
        leaders = []
        for spec in self.engines:
            addresses = [process.announced(START_S)["address"] for process in followers[spec.slot]]
            leaders.append(self._rank(spec, 0, addresses))
            self._say(f"{spec.slot}: loading {spec.model_path} (engine {spec.engine}, TP {spec.tp_size})")
        for leader in leaders:
            facts = leader.announced(START_S)
            self._say(f"{leader.name}: ready at {facts['address']}, rollout at {facts['rollout_address']}")
        self._await_routable()

    def _rank(self, spec: EngineSpec, rank: int, followers: Sequence[str] = ()) -> Process:
        arguments = [
            *("--engine", spec.engine, "--model-path", spec.model_path),
            *("--rank", str(rank)) * bool(rank),
            *("--tp-size", str(spec.tp_size), "--device", self._device(spec, rank)),
        ]
        for name, value in spec.options.items():
            arguments += ["--option", f"{name}={value}"]
        if rank:
            return self._spawn(f"{spec.slot}.{rank}", ["worker", *arguments], spec.environment)
        arguments += ["--slot", spec.slot, "--model", spec.model, "--coordinator", self.address]
        for address in followers:
            arguments += ["--follower", address]
        if spec.frozen:
            arguments.append("--frozen")
        return self._spawn(spec.slot, ["stage", *arguments], spec.environment)

    def _device(self, spec: EngineSpec, rank: int) -> str:
        if spec.device != "cuda":
            return spec.device
        before = self.engines[: self.engines.index(spec)]
        return f"cuda:{sum(other.tp_size for other in before if other.device == 'cuda') + rank}"

    def _spawn(self, name: str, arguments: list[str], environment: Mapping[str, str] | None = None) -> Process:
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(environment or {})}
        if self._token:
            variables["RLCTL_TOKEN"] = self._token
        if self._insecure:
            arguments = [*arguments, "--insecure"]
        process = Process(name, arguments, self.directory / "logs" / f"{name}.log", variables, self._module)
        self.processes.append(process)
        return process

    def _await_routable(self) -> None:
        deadline = time.monotonic() + READY_S
        wanted = {spec.slot for spec in self.engines}
        with self.connect() as fleet:
            while True:
                stages = {stage.registration.slot: stage for stage in fleet.status().stages}
                waiting = sorted(slot for slot in wanted if slot not in stages or not stages[slot].routable)
                if not waiting:
                    return
                for process in self.processes:
                    if process.returncode is not None:
                        raise process.failure()
                if time.monotonic() > deadline:
                    raise self._not_ready(waiting)
                time.sleep(POLL_S)

    def _not_ready(self, waiting: Sequence[str]) -> RlctlError:
        return Reason.DEADLINE_EXCEEDED.error(
            f"not routable after {READY_S:g} s: {', '.join(waiting)}",
            next_step=f"See {self.directory / 'logs'}.",
        )
