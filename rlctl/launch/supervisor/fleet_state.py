"""The state directory of a fleet that ``rlctl up`` started: supervisor and addresses.

A supervisor holds the lock of the state directory for life, so two supervisors never share a directory. The supervisor
writes ``fleet.json``. The file has the start time of the process beside the pid, because pids are reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.runtime import private_files

STARTING, READY = "starting", "ready"
STUCK_S = 360.0
"""Seconds without a step of a supervisor, after which no command waits for it. A coordinator's start is one step."""


def state_directory(name: str = "default") -> Path:
    """Return the directory of a fleet's journal, logs and process ids: XDG_STATE_HOME/rlctl/NAME."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
    return Path(base) / "rlctl" / name


def state_file(name: str) -> Path:
    """Return the path of the fleet's state file (JSON)."""
    return state_directory(name) / "fleet.json"


@dataclass(frozen=True)
class FleetState:
    """A supervised fleet.

    Attributes:
        pid: pid of the supervisor.
        started: start time of the supervisor, from :func:`identity`.
        phase: STARTING or READY.
        endpoint: address of the coordinator; "" until known.
        directory: state directory: journal and logs.
        processes: pids of the started processes, by name.
        deployment: the running :class:`rlctl.launch.deployment.Deployment` as data; {} until ready.
        engines: phase of each engine, by slot.
        gateways: URL of the HTTP gateway by model, http://HOST:PORT.
        routers: URL of the router in front of the gateway, for models with a router.
        identities: :func:`identity` of each of the ``processes`` on this machine.
    """

    name: str
    pid: int
    started: str
    phase: str
    endpoint: str
    directory: str
    processes: dict[str, int] = field(default_factory=dict)
    deployment: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    gateways: dict[str, str] = field(default_factory=dict)
    routers: dict[str, str] = field(default_factory=dict)
    identities: dict[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the same process still runs."""
        return bool(self.started) and identity(self.pid) == self.started

    @property
    def survivors(self) -> dict[str, int]:
        """Pids of the fleet's processes that still run on this machine, by name."""
        return {
            name: pid
            for name, pid in self.processes.items()
            if self.identities.get(name) and identity(pid) == self.identities[name]
        }


_KINDS = {field.name: {"str": str, "int": int}.get(str(field.type), dict) for field in dataclasses.fields(FleetState)}


def read(name: str) -> FleetState | None:
    """Return the content of the state file; None without a readable file."""
    try:
        state = FleetState(**json.loads(state_file(name).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return state if all(type(getattr(state, name)) is kind for name, kind in _KINDS.items()) else None


def up() -> list[FleetState]:
    """Return the fleets that are up on this machine, by name."""
    directories = sorted(state_directory("").glob("*/fleet.json"))
    states = (read(path.parent.name) for path in directories)
    return [state for state in states if state is not None and state.alive]


def write(state: FleetState) -> None:
    """Replace the state file in one step."""
    path = state_file(state.name)
    private_files.make_directory(path.parent, own=True)
    new_file = path.with_suffix(".new")
    private_files.write_text(new_file, json.dumps(dataclasses.asdict(state), indent=2))
    new_file.replace(path)


def remove(name: str) -> None:
    state_file(name).unlink(missing_ok=True)


def note_step(name: str) -> None:
    """Note a step of the supervisor, in the modification time of the state file."""
    with contextlib.suppress(OSError):
        os.utime(state_file(name))


class Steps:
    """The steps of a supervisor, for a command that waits for it."""

    def __init__(self, name: str, pid: int, limit_s: float | None = None) -> None:
        """``limit_s``: seconds without a step; None: STUCK_S."""
        self._name = name
        self._pid = pid
        self._limit_s = STUCK_S if limit_s is None else min(limit_s, STUCK_S)
        self._last = 0
        self._since = time.monotonic()

    def refuse_stuck(self) -> None:
        """Raise DEADLINE_EXCEEDED if the supervisor has taken no step for too long. To be called again and again."""
        last = 0
        with contextlib.suppress(OSError):
            last = state_file(self._name).stat().st_mtime_ns
        if last != self._last:
            self._last, self._since = last, time.monotonic()
        elif time.monotonic() - self._since > self._limit_s:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"supervisor {self._pid} of fleet {self._name!r} has taken no step for {self._limit_s:g} s",
                next_step=f"Continue it (`kill -CONT {self._pid}`), or end it with the fleet's processes "
                f"(`kill -9 {self._pid}`).",
            )


@contextlib.contextmanager
def claimed(name: str) -> Iterator[int]:
    """Hold the fleet's lock. Raises BlockingIOError if the lock is taken.

    A child that inherits the descriptor holds the lock too, also after the end of this process.
    """
    directory = state_directory(name)
    private_files.make_directory(directory, own=True)
    with open(directory / "lock", "w", opener=private_files.opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock.fileno()


def identity(pid: int) -> str:
    """Return the start time of a process, which differs from that of a later process with the same pid; "" if not
    running.
    """
    try:
        # The name may contain spaces and brackets: count the fields after the last bracket. Field 22 is the start time
        # in ticks since the boot.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except ProcessLookupError:  # ended between the opening and the reading of the file
        return ""
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _started_by_ps(pid)
    return "" if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _started_by_ps(pid: int) -> str:
    """Return the start time on systems without /proc."""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    ).stdout.strip()
