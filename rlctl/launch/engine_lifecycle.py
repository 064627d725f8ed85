"""The life of an engine: started, loaded, healed, ready, drained, gone; and restarted after a failure.

:meth:`EngineRun.advance` does the possible steps and returns; a check of a process is the longest wait. The cause of a
wait is therefore always known, and many engines advance side by side.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.launcher import Launched, Launcher
from rlctl.launch.interface.spec import LOAD_S, EngineSpec
from rlctl.launch.local.child_processes import end, unended
from rlctl.runtime.kills import KILLED_S
from rlctl.runtime.restart_limit import Failures, RestartLimit
from rlctl.runtime.server_process import STOP_S
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY, STAGE_STATE_STALE
from rlctl.v1.fleet_pb2 import EngineFailure, Stage

START_S = 300.0
BACKOFF_AT_MOST_S = 60.0
TELL_S = 1.0
REMIND_S = 10.0
"""Seconds in a phase until the first progress message. The interval then doubles with each message."""
STEADY_S = 60.0
"""Seconds that an engine must be ready until the back-off is reset."""
CAUSE_S = 5.0
"""Longest wait for the failure of rank 0 after a follower has ended in order."""
STALE_S = 2.0
"""Seconds in which a stage with the published version is admitted. An engine without a heal that is still STALE
afterwards stays STALE.
"""

REPLACED = "its engine is replaced or removed by `rlctl up`"
"""Reason of a slot disabled before a drain. The next engine in the slot is enabled again, also by a new supervisor: the
reason is in the coordinator's journal.
"""


def backoff_of(first_s: float, failures: int) -> float:
    """Return the pause before the next start, in seconds, after ``failures`` failures in a row before this one."""
    return min(first_s * float(2 ** min(failures, 63)), BACKOFF_AT_MOST_S)  # a float has no room for 2**1024


class Phase(enum.Enum):
    """Phase in the life of an engine."""

    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    HEALING = "healing"
    STALE = "stale"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"


UP = (Phase.READY, Phase.STALE)
"""Phases without a further step: STALE waits for a heal by hand, or without a heal source for an update."""
ALIVE = (Phase.STARTING, Phase.LOADING, Phase.HEALING, *UP)


@dataclass(frozen=True)
class Limits:
    """Time limits of an engine, in seconds.

    Attributes:
        start_s: from the start of a process to its announcement.
        load_s: from the start of rank 0 to the loaded engine.
        heal_s: from the loaded engine to the routable stage.
        drain_s: for requests to end before an engine is stopped.
        backoff_s: before the first retry after a failure; doubles.
        restarts: restart limit of an engine.
    """

    start_s: float = START_S
    load_s: float = LOAD_S
    heal_s: float = 300.0
    drain_s: float = 60.0
    backoff_s: float = 1.0
    restarts: RestartLimit = field(default_factory=RestartLimit)


class EngineRun:
    """A launched engine.

    Attributes:
        spec: how the engine is started.
        processes: started processes that have not been seen to end.
        error: last failure, or None.
        by_hand: the coordinator heals the engine only on request.
        limits: time limits.
    """

    def __init__(
        self,
        spec: EngineSpec,
        launcher: Launcher,
        coordinator: str,
        limits: Limits,
        say: Callable[[str], None],
        *,
        by_hand: bool = False,
    ) -> None:
        """``by_hand``: the coordinator heals the engine only on request."""
        self.spec = spec
        self.by_hand = by_hand
        self.phase = Phase.WAITING
        self.processes: list[Launched] = []
        self.error: RlctlError | None = None
        self.failures = 0
        self.failing_since: Timestamp | None = None
        self._recent: Failures[Timestamp] = Failures()
        self.log_lines: list[str] = []
        self._launcher = launcher
        self._coordinator = coordinator
        self.limits = limits
        self._say = say
        self._since = time.monotonic()
        self._again_at = 0.0
        self._quiet_looks = 0
        self._healing_reported = False
        self._orderly_end: float | None = None
        self._killed: list[Launched] = []
        self._unended: RlctlError | None = None
        self._remind_s = REMIND_S

    # Requests of the controller.

    def start(self) -> None:
        """Start the followers, or rank 0 of an engine without followers."""
        spec = self.spec
        self._orderly_end = None
        self._killed.clear()
        self._enter(Phase.STARTING)
        if spec.followers:
            number, noun = len(spec.followers), "follower rank" if spec.nodes == 1 else "further node"
            self._say(f"{spec.slot}: starting {number} {noun}{'s' * (number > 1)}, then rank 0")
        try:
            for rank in spec.followers:
                self._launch(rank)
        except RlctlError as error:
            self._fail(error)
            return
        self.advance(None)

    def drain(self) -> None:
        """Let requests end, then stop the engine. The caller must prevent new requests."""
        if self.phase in (Phase.DRAINING, Phase.STOPPING, Phase.GONE):
            return
        if self.phase is Phase.READY:
            self._say(f"{self.spec.slot}: draining")
            self._quiet_looks = 0
            self._enter(Phase.DRAINING)
        else:
            self.stop()

    def stop(self) -> None:
        """Terminate the processes; processes that do not end are killed."""
        if self.phase in (Phase.STOPPING, Phase.GONE):
            return
        for process in reversed(self.processes):
            if process.returncode is None:
                end(process)
        self._enter(Phase.STOPPING)

    def again(self) -> None:
        """Start a failed engine again after the back-off."""
        if self.phase is Phase.FAILED and not self.processes and self._may_start:
            self._say(f"{self.spec.slot}: starting again (attempt {self.failures + 1})")
            self.start()

    def healed_by(self, *, hand: bool) -> None:
        """Set the kind of heal. An engine that waits for a heal by hand then waits for the coordinator's heal."""
        if self.by_hand and not hand and self.phase is Phase.STALE:
            self._enter(Phase.HEALING)
        self.by_hand = hand

    def forgive(self) -> None:
        """Reset failures and retry at once."""
        self.error = None
        self.failures = 0
        self._again_at = 0.0
        self._recent.forget()

    # Steps and failures.

    def advance(self, stage: Stage | None, *, idle: bool = False) -> None:
        """Take the possible steps.

        ``stage``: the coordinator's view of the slot; ``idle``: the slot has no requests.
        """
        if self.phase in ALIVE and (ended := self._ended()) is not None:
            self._fail(ended.failure())
        match self.phase:
            case Phase.STARTING:
                if all(process.serves for process in self.processes):
                    followers = [process.facts["address"] for process in self.processes]
                    self._enter(Phase.LOADING)
                    try:
                        self._launch(0, followers)
                    except RlctlError as error:
                        self._fail(error)
                    else:
                        self._say(f"{self.spec.slot}: {_loading(self.spec)}")
                else:
                    self._remind("starting")
                    self._limit(self.limits.start_s, "its followers did not come up")
            case Phase.LOADING:
                if self.leader.serves:
                    self._healing_reported = False
                    self._enter(Phase.HEALING)
                else:
                    self._remind("loading")
                    self._limit(self.limits.load_s, "it did not load")
            case Phase.HEALING | Phase.STALE:
                facts = self.leader.facts
                same_address = stage is not None and stage.registration.address == facts["address"]
                if stage is not None and same_address and stage.routable:
                    self._say(f"{self.spec.slot}: ready at {facts['address']}, rollout at {facts['rollout_address']}")
                    self._enter(Phase.READY)
                elif self.phase is Phase.STALE:
                    self._refuse_lost(stage)
                elif same_address and (lifted_by := self._held_by_operator(stage)):
                    assert stage is not None
                    self._say(f"{self.spec.slot}: up, {stage.not_routable}; `{lifted_by}` lets it serve")
                    self._enter(Phase.READY)
                elif same_address and (waits_for := self._waits_for(stage)):
                    self._say(f"{self.spec.slot}: up, stale, waits for {waits_for}")
                    self._enter(Phase.STALE)
                else:
                    why = (stage.not_routable if stage is not None else "") or "not registered"
                    if not self._healing_reported and time.monotonic() - self._since > TELL_S:
                        self._say(f"{self.spec.slot}: loaded, healing ({why})")
                        self._healing_reported = True
                    self._remind(f"healing ({why})")
                    self._limit(self.limits.heal_s, "not routable", why)
            case Phase.READY:
                self._refuse_lost(stage)
                if time.monotonic() - self._since > STEADY_S:
                    self.failures = 0
            case Phase.DRAINING:
                # Twice, since a request of a client that picked this stage before may still be under way.
                self._quiet_looks = self._quiet_looks + 1 if idle else 0
                if self._quiet_looks > 1 or self._ended() is not None:
                    self.stop()
                elif time.monotonic() - self._since > self.limits.drain_s:
                    self._say(
                        f"{self.spec.slot}: requests or an update still run after {self.limits.drain_s:g} s; "
                        "they are ended"
                    )
                    self.stop()
            case Phase.STOPPING:
                if not self._reap():
                    self._enter(Phase.GONE)
            case Phase.FAILED:
                self._reap()

    @property
    def leader(self) -> Launched:
        return next(process for process in self.processes if process.name == self.spec.slot)

    def failure(self, *, restart: bool) -> EngineFailure | None:
        """Return the failure for the coordinator, until the engine is up again. An ended process cannot report.

        ``restart``: the engine starts again after the back-off.
        """
        if self.error is None or self.phase not in (Phase.FAILED, Phase.STARTING, Phase.LOADING):
            return None
        retry = Timestamp()
        retry.FromMilliseconds(int((time.time() + self.again_in_s) * 1e3))
        given_up = self.given_up and restart
        return EngineFailure(
            reason=self.error.message,
            failures=len(self._recent) if given_up else self.failures,
            since=self._recent.first if given_up else self.failing_since,
            retry_time=retry if self.phase is Phase.FAILED and restart and not given_up else None,
            log=self.log_lines,
            given_up=given_up,
        )

    @property
    def given_up(self) -> bool:
        """Whether the engine has failed and only an operator starts it again."""
        return self.phase is Phase.FAILED and self._recent.exceed(self.limits.restarts)

    @property
    def retries(self) -> bool:
        """Whether the engine has failed and starts again after the back-off, in a fleet that restarts engines."""
        return self.phase is Phase.FAILED and not self.given_up and self.error is not self._unended

    @property
    def _may_start(self) -> bool:
        return time.monotonic() >= self._again_at and not self.given_up

    @property
    def again_in_s(self) -> float:
        """Seconds until a failed engine is retried."""
        return max(0.0, self._again_at - time.monotonic())

    def _launch(self, rank: int, followers: Sequence[str] = ()) -> None:
        self.processes.append(self._launcher.launch(self.spec, rank, self._coordinator, followers))

    def _ended(self) -> Launched | None:
        """Return a process that has ended: one that failed, if any.

        Followers end in order when rank 0 fails, a moment before rank 0 itself. Only rank 0 has the cause.
        """
        ended = [process for process in self.processes if process.returncode is not None]
        failed = next((process for process in ended if process.returncode), None)
        if failed is not None or not ended:
            return failed
        now = time.monotonic()
        self._orderly_end = self._orderly_end or now
        rank_zero_runs = any(p.name == self.spec.slot and p.returncode is None for p in self.processes)
        return None if rank_zero_runs and now - self._orderly_end < CAUSE_S else ended[0]

    def _waits_for(self, stage: Stage | None) -> str:
        """Return the heal or update that a stale engine waits for, or "". A restart would not help."""
        if stage is None or stage.state != STAGE_STATE_STALE or time.monotonic() - self._since <= STALE_S:
            return ""
        if self.by_hand:
            return f"a heal by hand: rlctl heal {self.spec.slot}"
        return f"the trainer's next update ({stage.not_routable})" if stage.unhealable else ""

    def _held_by_operator(self, stage: Stage | None) -> str:
        """Return the command that lifts an operator's pause or disabling of an otherwise ready stage, or ""."""
        disabled = stage is not None and not stage.enabled and stage.disabled_reason != REPLACED
        if stage is not None and stage.state == STAGE_STATE_READY and disabled:
            return f"rlctl enable {self.spec.slot}"
        if stage is not None and stage.state == STAGE_STATE_PAUSED and not stage.report.paused_by_update:
            return f"rlctl continue --slot {self.spec.slot}"
        return ""

    def _refuse_lost(self, stage: Stage | None) -> None:
        """Fail the run of a stage server that has lost the engine and cannot restart: the slot is blocked."""
        if stage is None or self.spec.restarts_itself or stage.registration.address != self.leader.facts["address"]:
            return
        lost_rank = next((rank for rank in stage.report.ranks if not rank.alive), None)
        if lost_rank is None:
            return
        why = f"{self.spec.slot} has lost rank {lost_rank.coordinates.rank}: {lost_rank.reason}"
        self._fail(Reason.ENGINE_FAILED.error(why, next_step=f"See {self.leader.log}."))

    def _remind(self, what: str) -> None:
        """Report that a phase continues, with the last log line of the process under way."""
        since_s = time.monotonic() - self._since
        if since_s < self._remind_s:
            return
        self._remind_s *= 2
        waiting = next((process for process in self.processes if not process.serves), self.processes[-1])
        log_line = waiting.last_log_line()
        self._say(
            f"{self.spec.slot}: still {what} after {since_s:.0f} s"
            + (f"; its log says: {log_line}" if log_line else "")
        )

    def _limit(self, limit_s: float, what: str, why: str = "") -> None:
        if time.monotonic() - self._since > limit_s:
            log = self.processes[-1].log if self.processes else "its log"
            self._fail(
                Reason.DEADLINE_EXCEEDED.error(
                    f"{self.spec.slot}: {what} within {limit_s:g} s" + (f": {why}" if why else ""),
                    next_step=f"See {log}.",
                )
            )

    def _fail(self, error: RlctlError) -> None:
        self.error = error
        pause_s = backoff_of(self.limits.backoff_s, self.failures)
        now = Timestamp()
        now.GetCurrentTime()
        if not self.failures:
            self.failing_since = now
        self._recent.add(time.monotonic(), now, self.limits.restarts)
        ended = self._ended() or next(reversed(self.processes), None)
        self.log_lines = ended.log_lines() if ended is not None else []
        self.failures += 1
        self._again_at = time.monotonic() + pause_s
        for process in self.processes:
            if process.returncode is None:
                end(process)
        self._enter(Phase.FAILED)

    def _reap(self) -> bool:
        """Remove ended processes, kill late processes; returns whether any process is left.

        A process that no kill ends stays until it ends, since it holds its GPU.
        """
        overdue_s = time.monotonic() - self._since - STOP_S
        for process in list(self.processes):
            if process.returncode is None and overdue_s > 0:
                self._kill(process)
            if process.returncode is None and overdue_s > KILLED_S:
                process.wait(0.0, 0.0)  # a server at a lost node is then LOST
            if process.returncode is not None:
                process.wait()
                self.processes.remove(process)
        if overdue_s > KILLED_S and self.processes and (self.error is None or self.error is not self._unended):
            self.error = self._unended = unended(self.processes)
        return bool(self.processes)

    def _kill(self, process: Launched) -> None:
        if process in self._killed:
            return
        self._say(f"{process.name} (pid {process.pid}) did not end in {STOP_S:g} s and was killed; see {process.log}")
        process.kill()
        self._killed.append(process)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since = time.monotonic()
        self._remind_s = REMIND_S


def _loading(spec: EngineSpec) -> str:
    where = f" at {spec.options['url']}" if spec.attached else ""
    parallel = f"TP {spec.tp_size}" + (f", PP {spec.pp_size}" if spec.pp_size > 1 else "")
    return f"loading {spec.model_path} (engine {spec.engine}{where}, {parallel})"
