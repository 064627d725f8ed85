"""The supervisor of a fleet of local processes: starts, watches and stops them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, Protocol

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.deployment import Deployment
from rlctl.launch.engine_lifecycle import BACKOFF_AT_MOST_S, backoff_of
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.control_socket import Request, Requests, listening
from rlctl.launch.supervisor.fleet_state import FleetState
from rlctl.runtime.terminal import discard_unwritten, time_limit

LOOK_S = 0.5
POLL_S = 0.05


class Settings(Protocol):
    """The settings of the command that owns the fleet."""

    @property
    def token(self) -> str | None: ...

    @property
    def timeout_s(self) -> float | None:
        """Bound of the fleet's start; None is no bound."""

    def say(self, text: str, /) -> None: ...


class Stopped(BaseException):
    """A signal requested the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def supervise(
    settings: Settings,
    deployment: Deployment,
    on_ready: Callable[[FleetState], None],
    *,
    lock: int | None = None,
    new: bool = False,
) -> NoReturn:
    """Start the fleet, keep its desired state until a signal arrives, stop the fleet, exit with 128 + the signal's
    number.

    ``on_ready`` is called once the fleet is settled. ``lock``: descriptor of the fleet's lock, if the parent of this
    process holds the lock. ``new``: start over, despite the journal of an earlier fleet of this name.

    Raises OPERATION_CONFLICT if a fleet of this name is up, and the launcher's errors.
    """
    try:
        with contextlib.ExitStack() as stack:
            if lock is None:
                stack.enter_context(claimed(deployment.name))
            else:
                os.set_inheritable(lock, False)
            signals = stack.enter_context(_stop_signals())
            stack.callback(_remove_state, deployment.name)
            _Supervisor(settings, deployment, new=new, signals=signals).hold(on_ready)
    except Stopped as stopped:
        settings.say(f"Fleet {deployment.name} is down.")
        sys.exit(128 + stopped.number)


def _remove_state(name: str) -> None:
    """Remove the state of a fleet, unless a killed process still runs: `rlctl up` waits for it."""
    state = fleet_state.read(name)
    if state is None or not state.survivors:
        fleet_state.remove(name)


@contextlib.contextmanager
def claimed(name: str) -> Iterator[int]:
    """Hold the fleet's lock; yields the descriptor. Raises OPERATION_CONFLICT if a fleet of this name is up."""
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(fleet_state.claimed(name))
        except BlockingIOError:
            raise name_in_use(name) from None
        yield lock


def name_in_use(name: str) -> RlctlError:
    """Return the error for a name whose fleet is up."""
    state = fleet_state.read(name)
    where = f" (supervisor {state.pid}, endpoint {state.endpoint or 'not known yet'})" if state else ""
    return Reason.OPERATION_CONFLICT.error(
        f"fleet {name!r} is up already{where}",
        field="name",
        next_step=f"`rlctl up FILE` changes it; `rlctl down --name {name}` ends it. Or choose another --name.",
    )


class _Supervisor:
    def __init__(
        self, settings: Settings, deployment: Deployment, *, new: bool = False, signals: Sequence[int] = ()
    ) -> None:
        """``signals``: received signals that request the end."""
        from rlctl.launch.fleet_controller import LaunchedFleet

        self._settings = settings
        self._signals = signals
        self._deployment = deployment
        self._asking: list[Request] = []
        directory = fleet_state.state_directory(deployment.name)
        pid = os.getpid()
        self._state = FleetState(
            deployment.name, pid, fleet_state.identity(pid), fleet_state.STARTING, "", str(directory)
        )
        self._reported: dict[str, RlctlError] = {}
        self._coordinator_at = 0.0
        self._coordinator_failures = 0
        self._unwritten = False
        self._fleet = LaunchedFleet(
            deployment.engines,
            directory=directory,
            listen=deployment.listen,
            token=settings.token,
            insecure=deployment.insecure,
            authority=deployment.authority,
            on_progress=self._say,
            limits=deployment.limits,
            launcher=deployment.launcher_of(directory / "logs", settings.token),
            reserved=deployment.reserved,
            gateways=deployment.gateways,
            heal_by_hand=deployment.heal_by_hand,
            min_healthy=deployment.min_healthy,
            graces={"--owner-grace": deployment.owner_grace_s, "--heal-grace": deployment.heal_grace_s},
            new=new,
            metrics=deployment.metrics,
            web=deployment.web,
        )

    def hold(self, on_ready: Callable[[FleetState], None]) -> NoReturn:
        from rlctl.launch.fleet_controller import interrupted

        fleet = self._fleet
        fleet_state.write(self._state)
        try:
            with time_limit(self._settings.timeout_s, "starting the fleet"):
                for _ in fleet.starting():
                    self._refuse_stopped()
                    self._tell_state(fleet_state.STARTING)
                    time.sleep(POLL_S)
            with listening(fleet.directory) as requests:
                self._tell_state(fleet_state.READY)
                try:
                    on_ready(self._state)
                except OSError as error:  # no reader is left, or the disk is full: the fleet continues
                    discard_unwritten(sys.stdout)
                    self._say(f"Ready. Warning: the fleet's state could not be written: {error.strerror}")
                while True:
                    self._refuse_stopped()
                    self._look()
                    request = requests.wait(LOOK_S)
                    if request is not None:
                        self._apply(request, requests)
        except Stopped:
            self._settings.say(interrupted(len(fleet.processes)))
            raise
        finally:
            fleet.stop()

    def _refuse_stopped(self) -> None:
        """Raise Stopped after a signal. The first Stopped may be lost: Python drops it in destructors and callbacks."""
        if self._signals:
            raise Stopped(self._signals[0])

    def _apply(self, request: Request, requests: Requests) -> None:
        """Bring the fleet to the requested deployment, or to that of a later request that arrives meanwhile.

        A failed engine is retried; the rest continues unchanged.
        """
        if not self._take(request):
            return
        self._asking = [request]
        try:
            for _ in self._fleet.settling():
                self._refuse_stopped()
                self._tell_state(fleet_state.READY)
                previous, next_request = self._deployment, requests.wait(POLL_S)
                if next_request is not None and self._take(next_request):
                    if next_request.deployment != previous:
                        self._answer(
                            Reason.OPERATION_CONFLICT.error(
                                "another `rlctl up` has changed the fleet before this change",
                                next_step="`rlctl plan FILE` shows what is different now.",
                            )
                        )
                    self._asking.append(next_request)
        except RlctlError as error:
            self._say(f"Warning: {error}")
            self._answer(error)
        else:
            self._tell_state(fleet_state.READY)
            self._answer()

    def _answer(self, error: RlctlError | None = None) -> None:
        """Answer the open requests with the state or an error."""
        for request in self._asking:
            if error is not None:
                request.failed(error)
            else:
                request.done(self._state)
        self._asking.clear()

    def _take(self, request: Request) -> bool:
        """Make the requested deployment the wanted deployment; False after a refusal, which answers the request."""
        deployment = request.deployment
        try:
            if refused := deployment.refusal(self._deployment):
                raise refused
            if request.against != json.loads(json.dumps(self._deployed)):
                # The GPUs may be taken, and the caller has not agreed to all removals.
                raise Reason.OPERATION_CONFLICT.error(
                    f"fleet {deployment.name!r} has been changed since this was planned",
                    next_step="Repeat the command: it then makes a new plan.",
                )
            self._fleet.want(
                deployment.engines,
                deployment.reserved,
                deployment.gateways,
                deployment.heal_by_hand,
                limits=deployment.limits,
                restarted=request.restart,
                force=request.force,
                min_healthy=deployment.min_healthy,
            )
        except RlctlError as error:
            request.failed(error)
            return False
        self._deployment = deployment
        self._tell_state(fleet_state.READY)  # for later plans
        return True

    @property
    def _deployed(self) -> dict[str, Any]:
        """The deployment that plans compare against."""
        return {**self._deployment.data, "engines": [spec.data for spec in self._fleet.engines]}

    def _look(self) -> None:
        """Report ended processes, and restart them if wanted. Raises ENGINE_FAILED if no process is left."""
        fleet = self._fleet
        self._look_at_coordinator()
        fleet.look(restart=self._deployment.restart)
        for slot, run in fleet.runs.items():
            if run.error is not None and self._reported.get(slot) is not run.error:
                self._reported[slot] = run.error
                restart_text = (
                    f" Starting again in {run.again_in_s:.0f} s." if self._deployment.restart and run.retries else ""
                )
                if run.given_up and self._deployment.restart:
                    limit = run.limits.restarts
                    restart_text = (
                        f" It has been started again {limit.restarts} times within {limit.within_s:g} s, and is not any"
                        f" more. Start it: rlctl restart {slot}"
                    )
                self._say(f"Warning: {run.error}{restart_text}")
        for model, error in fleet.gateways.errors.items():
            if self._reported.get(f"gateway-{model}") is not error:
                self._reported[f"gateway-{model}"] = error
                self._say(f"Warning: {error}")
        if (unended := fleet.gateways.unended) is not None and self._reported.get("gateways") is not unended:
            self._reported["gateways"] = unended
            self._say(f"Warning: {unended}")
        self._tell_state(fleet_state.READY)
        if not self._deployment.restart and fleet.all_ended:
            raise Reason.ENGINE_FAILED.error(
                "every process of the fleet has ended", next_step=f"See {fleet.directory}/logs."
            )

    def _look_at_coordinator(self) -> None:
        """Report an ended coordinator, and start it again after the back-off if wanted."""
        fleet = self._fleet
        if fleet.coordinator is None or fleet.coordinator.returncode is None:
            return
        if "coordinator" not in self._reported:
            if time.monotonic() - self._coordinator_at > BACKOFF_AT_MOST_S:
                self._coordinator_failures = 0  # served long enough: earlier failures do not count
            self._coordinator_failed(fleet.coordinator.failure())
            if not self._deployment.restart:
                self._say(
                    "  The stages serve until their lease runs out. Start it again: "
                    f"rlctl coordinator --listen {fleet.address} --journal {fleet.journal}"
                )
        if self._deployment.restart and time.monotonic() >= self._coordinator_at:
            try:
                fleet.restart_coordinator()
            except RlctlError as error:
                self._coordinator_failed(error)
            else:
                del self._reported["coordinator"]
                self._coordinator_at = time.monotonic()
                self._say(f"coordinator at {fleet.address} again; the fleet goes on")

    def _coordinator_failed(self, error: RlctlError) -> None:
        self._reported["coordinator"] = error
        self._say(f"Warning: {error}")
        self._coordinator_at = time.monotonic() + backoff_of(
            self._deployment.limits.backoff_s, self._coordinator_failures
        )
        self._coordinator_failures += 1

    def _tell_state(self, phase: str) -> None:
        fleet = self._fleet
        state = dataclasses.replace(
            self._state,
            phase=phase,
            endpoint=fleet.address,
            processes={process.name: process.pid for process in fleet.processes},
            engines={slot: run.phase.value for slot, run in fleet.runs.items()},
            gateways=fleet.gateways.addresses,
            routers=fleet.gateways.routers,
            identities=self._identities(),
            deployment=self._deployed if phase == fleet_state.READY else {},
        )
        if state == self._state:
            fleet_state.note_step(state.name)
        else:
            try:
                fleet_state.write(state)
            except OSError as error:  # for example a full disk: the fleet continues, and a later step writes again
                if not self._unwritten:
                    self._say(f"Warning: the state of the fleet cannot be written: {error}")
                self._unwritten = True
            else:
                self._state, self._unwritten = state, False

    def _identities(self) -> dict[str, str]:
        """Return the identities of processes on this machine; each is read once."""
        from rlctl.launch.local.child_processes import Process

        local_processes = [process for process in self._fleet.processes if isinstance(process, Process)]
        pids, identities = self._state.processes, self._state.identities
        return {
            each.name: identities[each.name]
            if each.name in identities and pids.get(each.name) == each.pid
            else fleet_state.identity(each.pid)
            for each in local_processes
        }

    def _say(self, line: str) -> None:
        fleet_state.note_step(self._state.name)
        with contextlib.suppress(OSError):  # a log on a full disk, or a closed terminal
            self._settings.say(line)
        for request in self._asking:
            request.say(line)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Sequence[int]]:
    """Raise Stopped at the first SIGINT, SIGTERM or SIGHUP; at the second exit at once, and the processes end too.

    Yields the received signals.
    """
    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        os._exit(128 + number)

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        for each in before:
            signal.signal(each, leave)
        received.append(number)
        raise Stopped(number)

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup sets this
            before[number] = signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
