"""What owns a fleet of local processes: starts it, watches it, takes it down when it is told to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rlctl.cli import state
from rlctl.cli.session import time_limit
from rlctl.cli.settings import Settings
from rlctl.cli.state import FleetState
from rlctl.errors import Reason, RlctlError

if TYPE_CHECKING:
    from rlctl.launch.local import LocalFleet

LOOK_S = 0.5


@dataclass(frozen=True)
class Plan:
    """A fleet to start.

    Attributes:
        name: its name; names the state directory.
        directory: state directory.
        checkpoint: directory of the checkpoint that every engine loads.
        model: model that they serve.
        engine: plug-in.
        engines: how many.
        tp_size: ranks of each.
        listen: where the coordinator listens.
        device: what the ranks compute on, "cpu" or "cuda".
        options: settings of the plug-in.
        insecure: bind where others can reach it though there is no token.
    """

    name: str
    directory: Path
    checkpoint: str
    model: str
    engine: str
    engines: int
    tp_size: int
    listen: str
    device: str = "cpu"
    options: dict[str, str] = field(default_factory=dict)
    insecure: bool = False

    @property
    def slots(self) -> list[str]:
        """Slots that the engines fill."""
        return [f"{self.model}-{index}" for index in range(self.engines)]


class Stopped(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def supervise(settings: Settings, plan: Plan, on_ready: Callable[[FleetState], None]) -> NoReturn:
    """Start the fleet, hold it until a signal comes, take it down, exit with 128 + the signal's number.

    ``on_ready`` is told once every stage is routable. Raises OPERATION_CONFLICT when a fleet of this name is up, and
    what the launcher raises.
    """
    try:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(state.claimed(plan.name))
            except BlockingIOError:
                raise taken(plan.name) from None
            stack.enter_context(_stop_signals())
            stack.callback(state.remove, plan.name)
            _hold(settings, plan, on_ready)
    except Stopped as stopped:
        settings.say(f"Fleet {plan.name} is down.")
        sys.exit(128 + stopped.number)


def taken(name: str) -> RlctlError:
    """The error when a fleet of this name is up."""
    other = state.read(name)
    where = f" (supervisor {other.pid}, endpoint {other.endpoint or 'not known yet'})" if other else ""
    return Reason.OPERATION_CONFLICT.error(
        f"fleet {name!r} is up already{where}",
        field="name",
        next_step=f"Take it down with `rlctl down --name {name}`, or choose another --name.",
    )


def _hold(settings: Settings, plan: Plan, on_ready: Callable[[FleetState], None]) -> NoReturn:
    from rlctl.launch.local import EngineSpec, LocalFleet, interrupted

    present = FleetState(plan.name, os.getpid(), state.identity(os.getpid()), state.STARTING, "", str(plan.directory))
    state.write(present)
    set_journal_aside(plan.directory)
    fleet = LocalFleet(
        [
            EngineSpec(slot, plan.checkpoint, plan.model, plan.engine, plan.tp_size, plan.device, plan.options)
            for slot in plan.slots
        ],
        directory=plan.directory,
        listen=plan.listen,
        token=settings.token,
        insecure=plan.insecure,
        on_progress=settings.say,
    )
    try:
        with time_limit(settings.timeout_s, "starting the fleet"):
            endpoint = fleet.start()
        processes = {process.name: process.pid for process in fleet.processes}
        present = dataclasses.replace(present, phase=state.READY, endpoint=endpoint, processes=processes)
        state.write(present)
        on_ready(present)
        _watch(settings, fleet)
    except Stopped:
        if fleet.processes:  # else they were taken down while starting
            settings.say(interrupted(len(fleet.processes)))
        raise
    finally:
        fleet.stop()


def _watch(settings: Settings, fleet: LocalFleet) -> NoReturn:
    """Say which processes end. Raises ENGINE_FAILED when none is left."""
    ended: set[str] = set()
    while len(ended) < len(fleet.processes):
        for process in fleet.processes:
            if process.returncode is not None and process.name not in ended:
                ended.add(process.name)
                settings.say(f"Warning: {process.failure()}")
                if process.name == "coordinator":
                    journal = fleet.directory / "journal.db"
                    settings.say(
                        "  The stages serve until their lease runs out. Start it again: "
                        f"rlctl coordinator --listen {fleet.address} --journal {journal}"
                    )
        time.sleep(LOOK_S)
    raise Reason.ENGINE_FAILED.error("every process of the fleet has ended", next_step=f"See {fleet.directory}/logs.")


def set_journal_aside(directory: Path) -> None:
    """Keep the journal of an earlier fleet of this name as ``journal.previous.db``: a new fleet has new versions."""
    if not (directory / "journal.db").exists():
        return
    for suffix in ("", "-wal", "-shm"):
        old = directory / f"journal.db{suffix}"
        aside = directory / f"journal.previous.db{suffix}"
        aside.unlink(missing_ok=True)
        if old.exists():
            old.rename(aside)


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Stopped; a second one leaves at once (the processes then end too)."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for each in before:
            signal.signal(each, leave)
        raise Stopped(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
