"""The state directory of a fleet that ``rlctl up`` started: its supervisor and its addresses.

A supervisor holds the lock of its state directory for its whole life, so two supervisors never share one. It writes
``fleet.json``. The file has the start time of the process beside its pid, because pids are used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.runtime import private_files

STARTING, READY = "starting", "ready"


def state_directory(name: str = "default") -> Path:
    """Where a fleet's journal, logs and process ids are kept: XDG_STATE_HOME/rlctl/NAME."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(Path.home(), ".local", "state")
    return Path(base) / "rlctl" / name


def state_file(name: str) -> Path:
    """What is known of the fleet, as JSON."""
    return state_directory(name) / "fleet.json"


@dataclass(frozen=True)
class FleetState:
    """A supervised fleet.

    Attributes:
        name: the fleet's name.
        pid: of its supervisor.
        started: when that process started, as :func:`identity` tells it.
        phase: STARTING or READY.
        endpoint: address of the coordinator; "" until it is known.
        directory: state directory: journal and logs.
        processes: pids of what it started, by name.
        deployment: a :class:`rlctl.launch.deployment.Deployment` as data, what runs; {} until it is ready.
        engines: where each engine is in its life, by slot.
        gateways: where the HTTP gateway of a model answers, http://HOST:PORT.
        routers: where the router in front of it does, for models that have one.
        identities: of those ``processes`` that run on this machine, as :func:`identity` tells them.
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
        """Whether that very process still runs."""
        return bool(self.started) and identity(self.pid) == self.started

    @property
    def survivors(self) -> dict[str, int]:
        """Pids of its processes that still run on this machine, by name."""
        return {
            name: pid
            for name, pid in self.processes.items()
            if self.identities.get(name) and identity(pid) == self.identities[name]
        }


_KINDS = {field.name: {"str": str, "int": int}.get(str(field.type), dict) for field in dataclasses.fields(FleetState)}


def read(name: str) -> FleetState | None:
    """What the state file says; None when there is none that can be read."""
    try:
        found = FleetState(**json.loads(state_file(name).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return found if all(type(getattr(found, name)) is kind for name, kind in _KINDS.items()) else None


def up() -> list[FleetState]:
    """Fleets that are up on this machine, by name."""
    directories = sorted(state_directory("").glob("*/fleet.json"))
    found = (read(path.parent.name) for path in directories)
    return [state for state in found if state is not None and state.alive]


def write(state: FleetState) -> None:
    """Replace the state file in one step."""
    path = state_file(state.name)
    private_files.make_directory(path.parent, own=True)
    fresh = path.with_suffix(".new")
    private_files.write_text(fresh, json.dumps(dataclasses.asdict(state), indent=2))
    fresh.replace(path)


def remove(name: str) -> None:
    """Remove the state file."""
    state_file(name).unlink(missing_ok=True)


@contextlib.contextmanager
def claimed(name: str) -> Iterator[int]:
    """Hold the fleet's lock. Raises BlockingIOError when another process does.

    A child that is given the descriptor holds it too, and goes on holding it.
    """
    directory = state_directory(name)
    private_files.make_directory(directory, own=True)
    with open(directory / "lock", "w", opener=private_files.opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock.fileno()


def identity(pid: int) -> str:
    """What tells a process from a later one with the same pid: when it started. "" when it does not run."""
    try:
        # The name may hold spaces and brackets: fields are counted after the last one. The 22nd is the start time in
        # ticks since the boot.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except ProcessLookupError:  # it ended between the opening of its file and the reading
        return ""
    except FileNotFoundError:
        return "" if Path("/proc/self/stat").exists() else _started_by_ps(pid)
    return "" if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _started_by_ps(pid: int) -> str:
    """Start time on systems without /proc."""
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    ).stdout.strip()
