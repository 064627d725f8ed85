"""The channel of ``rlctl up FILE`` to the supervisor of a running fleet: a socket in the state directory.

A request is one line of JSON: the wanted deployment, and the deployment that the plan compared with. The answer is
lines of ``{"say": ...}`` and at the end ``{"state": ...}`` or ``{"error": ...}``. The change continues if the caller
disconnects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.launch.deployment import Deployment
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.fleet_state import FleetState, Steps
from rlctl.v1.common_pb2 import ErrorDetail

SOCKET = "control.sock"
READ_S = 5.0
LOOK_S = 0.5


class Request:
    """A requested change of the fleet.

    Attributes:
        deployment: the wanted deployment.
        against: the deployment that the plan compared with, from :attr:`FleetState.deployment`.
        restart: slots whose engines are restarted.
        force: restart them also below min_healthy.
    """

    def __init__(
        self,
        connection: socket.socket,
        deployment: Deployment,
        against: dict[str, Any],
        restart: Sequence[str] = (),
        *,
        force: bool = False,
    ) -> None:
        self.deployment = deployment
        self.against = against
        self.restart = restart
        self.force = force
        self._connection = connection

    def say(self, line: str) -> None:
        self._send({"say": line})

    def done(self, state: FleetState) -> None:
        """Answer with the state after the change."""
        self._send({"state": dataclasses.asdict(state)})
        self._connection.close()

    def failed(self, error: RlctlError) -> None:
        _refuse(self._connection, error)

    def _send(self, answer: dict[str, Any]) -> None:
        _tell(self._connection, answer)


def _refuse(connection: socket.socket, error: RlctlError) -> None:
    detail = {
        "reason": error.reason.name,
        "message": error.message,
        "field": error.field,
        "next_step": error.next_step,
    }
    _tell(connection, {"error": detail})
    connection.close()


def _tell(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the caller has disconnected
        connection.sendall(json.dumps(answer).encode() + b"\n")


class Requests:
    """The supervisor's end of the socket."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def wait(self, timeout_s: float) -> Request | None:
        """Return the next request within the time, or None."""
        self._listener.settimeout(timeout_s)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        except OSError:  # for example no free file descriptor: the caller waits, and the fleet continues
            time.sleep(timeout_s)
            return None
        connection.settimeout(READ_S)
        try:
            with connection.makefile("rb") as lines:
                message = json.loads(lines.readline())
                deployment, against = Deployment.of(message["wanted"]), dict(message["against"])
                restart, force = [str(slot) for slot in message.get("restart", ())], bool(message.get("force"))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            connection.close()
            return None
        except RlctlError as error:
            _refuse(connection, error)
            return None
        return Request(connection, deployment, against, restart, force=force)


@contextlib.contextmanager
def listening(directory: Path) -> Iterator[Requests]:
    """Listen in a state directory; for this user only."""
    path = directory / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, _short(path) as name:
        listener.bind(name)
        path.chmod(0o600)
        listener.listen(8)
        try:
            yield Requests(listener)
        finally:
            path.unlink(missing_ok=True)


def apply(
    running: FleetState,
    deployment: Deployment,
    say: Callable[[str], None],
    *,
    restart: Sequence[str] = (),
    force: bool = False,
    timeout_s: float | None = None,
) -> FleetState:
    """Make the supervisor change the fleet to a deployment, and return the state after the change.

    ``running``: the state that ``deployment`` was planned against. ``restart``: slots whose engines are restarted.
    ``force``: restart them also below min_healthy.

    Raises the error of the supervisor or of an engine. Raises OPERATION_CONFLICT if the supervisor is not ready. Raises
    OPERATION_CONFLICT if a different command changes the fleet between the plan and the end. Raises DEADLINE_EXCEEDED
    after ``timeout_s``; the supervisor continues. Raises DEADLINE_EXCEEDED for a supervisor that takes no step.
    """
    directory = Path(running.directory)
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    call_s = fleet_state.STUCK_S if timeout_s is None else timeout_s
    with socket.socket(socket.AF_UNIX) as connection, _short(directory / SOCKET) as name:
        connection.settimeout(call_s)
        try:
            connection.connect(name)
        except OSError:
            raise Reason.OPERATION_CONFLICT.error(
                f"fleet {deployment.name!r} is still starting, or going down",
                next_step="Try again when `rlctl up` has printed Ready.",
            ) from None
        try:
            message = {
                "wanted": deployment.data,
                "against": running.deployment,
                "restart": list(restart),
                "force": force,
            }
            connection.sendall(json.dumps(message).encode() + b"\n")
            return _follow(_before(deadline, connection, Steps(running.name, running.pid)), say)
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"the change is not done after {call_s:g} s; the supervisor goes on", next_step="See `rlctl status`."
            ) from None
        except OSError:
            raise _ended() from None


def _before(deadline: float, connection: socket.socket, steps: Steps) -> Iterator[bytes]:
    """Yield the lines that arrive before the deadline. Raises TimeoutError, however many lines arrive."""
    received = b""
    while True:
        steps.refuse_stuck()
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        connection.settimeout(min(remaining_s, LOOK_S))
        with contextlib.suppress(TimeoutError):
            part = connection.recv(65536)
            if not part:
                return
            *lines, received = (received + part).split(b"\n")
            yield from lines


def _follow(lines: Iterable[bytes], say: Callable[[str], None]) -> FleetState:
    for line in lines:
        answer = json.loads(line)
        if "say" in answer:
            say(answer["say"])
        elif "state" in answer:
            return FleetState(**answer["state"])
        elif "error" in answer:
            raise from_detail(ErrorDetail(**answer["error"]))
    raise _ended()


def _ended() -> RlctlError:
    return Reason.UNREACHABLE.error("the supervisor has ended; the fleet is down", next_step="See its log.")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield the path or, since a socket's path has at most about 100 bytes, a path through an open directory."""
    if len(os.fsencode(path)) < 100 or not Path("/proc/self/fd").exists():
        yield str(path)
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
