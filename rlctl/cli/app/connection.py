"""The connection of a command, and the effect of Ctrl-C during a wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rlctl.cli.app.exit_codes import Exit
from rlctl.cli.app.settings import Settings
from rlctl.contract.errors import Reason, RlctlError, Unavailable
from rlctl.runtime.addresses import split
from rlctl.runtime.terminal import time_limit
from rlctl.traces.context import VARIABLE, received, valid

if TYPE_CHECKING:
    from rlctl.launch.supervisor.fleet_state import FleetState
    from rlctl.sdk.blocking import Fleet

PROBE_S = 3.0
CONNECT_S = 10.0

NO_ANSWER = (
    "If the coordinator's process hangs or is stopped: `rlctl logs coordinator` shows its pid; continue it "
    "(`kill -CONT PID`), or end it (`kill -9 PID`) and the supervisor starts it again."
)
"""Next step for an endpoint that accepts connections and does not answer."""


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[Fleet]:
    """Connect to the fleet at the endpoint; closes the connection at the end.

    Raises UNREACHABLE, at once if the endpoint has no listener, and DEADLINE_EXCEEDED if --timeout ends first. Raises
    FIELD_REQUIRED if no endpoint is set and several fleets are up.
    """
    if not settings.verbose:
        # gRPC's own lines about connections repeat the errors.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    limit_s = settings.timeout_s or CONNECT_S
    endpoint = settings.endpoint
    if settings.mutating:
        settings.announce_fleet()
    probe(endpoint, limit_s, settings.fleet_choice.fleet)
    from rlctl.sdk.blocking import connect

    received.set(valid(os.environ.get(VARIABLE)))
    try:
        opened = connect(
            endpoint, token=settings.token, tls=settings.tls, timeout_s=min(CONNECT_S, limit_s), client="cli"
        )
    except Unavailable as error:
        if limit_s < CONNECT_S:
            raise _time_was_up(endpoint, limit_s) from None
        if error.reason is Reason.UNREACHABLE:
            raise _silent(endpoint) from None
        raise
    with opened as fleet:
        yield fleet


def probe(endpoint: str, limit_s: float, fleet: FleetState | None = None) -> None:
    """Raise UNREACHABLE if the endpoint has no listener; gRPC would retry for the whole time limit.

    ``fleet``: this machine's fleet, if the endpoint is its coordinator's.
    """
    try:
        if endpoint.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(endpoint.removeprefix("unix:"))
        else:
            socket.create_connection(split(endpoint, "endpoint"), timeout=min(PROBE_S, limit_s)).close()
    except OSError as error:
        if isinstance(error, TimeoutError) and limit_s < PROBE_S:
            raise _time_was_up(endpoint, limit_s) from None
        raise Reason.UNREACHABLE.error(
            f"no coordinator answers at {endpoint}: {error.strerror or error}",
            next_step="`rlctl up` starts a fleet; --endpoint or RLCTL_ENDPOINT names another coordinator."
            if fleet is None
            else f"`rlctl logs supervisor --name {fleet.name}` shows whether the coordinator starts again.",
        ) from None


def _silent(endpoint: str) -> RlctlError:
    return Reason.UNREACHABLE.error(f"a process listens at {endpoint} and does not answer", next_step=NO_ANSWER)


def _time_was_up(endpoint: str, limit_s: float) -> RlctlError:
    return Reason.DEADLINE_EXCEEDED.error(
        f"no coordinator answered at {endpoint} within {limit_s:g} s", next_step=f"Give a longer --timeout. {NO_ANSWER}"
    )


@contextlib.contextmanager
def bounded(settings: Settings) -> Iterator[Fleet]:
    """Connect as :func:`connected`, for commands other than verbs: --timeout bounds the whole block."""
    with time_limit(settings.timeout_s, "the command"), connected(settings) as fleet:
        yield fleet


@contextlib.contextmanager
def interruptible(farewell: Callable[[], None]) -> Iterator[None]:
    """Handle signals during a change: the first Ctrl-C calls ``farewell`` and stops the wait, a second exits at once.

    SIGTERM calls ``farewell`` and exits too. The coordinator continues the sent request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(signal.SIGINT, leave)
        farewell()
        if number == signal.SIGTERM:
            raise SystemExit(Exit.TERMINATED)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
