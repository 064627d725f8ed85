"""One engine's life: started, loaded, healed, ready, drained, gone; and started again when it ends by itself.

:meth:`EngineRun.advance` does what can be done now and returns; nobody waits inside of it longer than a look at a
process takes. What an engine is waiting for is therefore always known, and many go through it side by side.
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
from rlctl.launch.local.child_processes import STOP_S, end
from rlctl.runtime.restart_limit import Failures, RestartLimit
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY, STAGE_STATE_STALE
from rlctl.v1.fleet_pb2 import EngineFailure, Stage

START_S = 300.0
BACKOFF_AT_MOST_S = 60.0
TELL_S = 1.0
REMIND_S = 10.0
"""After so long in a phase people are told that it goes on, then after twice, four times ... as long."""
STEADY_S = 60.0
"""An engine that was ready for so long has its back-off forgotten."""
STALE_S = 2.0
"""An engine that nobody heals is taken to stay stale after so long: one that has the published version is admitted
within a moment."""

REPLACED = "its engine is replaced or removed by `rlctl up`"
"""Why a slot is disabled before it is drained. The engine that fills it next is enabled again, by another supervisor
too: the reason is in the coordinator's journal.
"""


class Phase(enum.Enum):
    """Where an engine is in its life."""

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
"""It is as far as it comes by itself: STALE waits for a heal by hand, or for an update where nothing can heal it."""
ALIVE = (Phase.STARTING, Phase.LOADING, Phase.HEALING, *UP)


@dataclass(frozen=True)
class Limits:
    """How long what may take, seconds.

    Attributes:
        start_s: from the start of a process until it has announced itself.
        load_s: from the start of rank 0 until its engine has loaded.
        heal_s: from then until the stage is routable.
        drain_s: for requests to end before an engine is stopped.
        backoff_s: before the first attempt after a failure; doubles.
        restarts: how often an engine is started again after failures, and within which time.
    """

    start_s: float = START_S
    load_s: float = LOAD_S
    heal_s: float = 300.0
    drain_s: float = 60.0
    backoff_s: float = 1.0
    restarts: RestartLimit = field(default_factory=RestartLimit)


class EngineRun:
    """One engine.

    Attributes:
        spec: how it is started.
        phase: where it is.
        processes: those that were started and not seen to have ended.
        error: why it failed last, or None.
        by_hand: the coordinator heals it only when somebody asks.
        limits: how long what may take.
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
        """``by_hand``: the coordinator heals it only when somebody asks."""
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
        self._told = False
        self._remind_s = REMIND_S

    # What it is told.

    def start(self) -> None:
        """Start its processes: the followers, or rank 0 where there are none."""
        spec = self.spec
        self._enter(Phase.STARTING)
        if spec.followers:
            all_of_them = f"{spec.ranks} ranks beside rank 0" if spec.nodes == 1 else f"{spec.nodes} nodes"
            self._say(f"{spec.slot}: starting ({len(spec.followers)} of its {all_of_them})")
        try:
            for rank in spec.followers:
                self._launch(rank)
        except RlctlError as error:
            self._fail(error)
            return
        self.advance(None)

    def drain(self) -> None:
        """Let requests end, then stop it. Whoever calls this sees to it that no new ones come."""
        if self.phase in (Phase.DRAINING, Phase.STOPPING, Phase.GONE):
            return
        if self.phase is Phase.READY:
            self._say(f"{self.spec.slot}: draining")
            self._quiet_looks = 0
            self._enter(Phase.DRAINING)
        else:
            self.stop()

    def stop(self) -> None:
        """Ask its processes to end; they are killed when they do not."""
        if self.phase in (Phase.STOPPING, Phase.GONE):
            return
        for process in reversed(self.processes):
            if process.returncode is None:
                end(process)
        self._enter(Phase.STOPPING)

    def again(self) -> None:
        """After a failure: start anew once its back-off is over."""
        if self.phase is Phase.FAILED and not self._reap() and self._may_start:
            self._say(f"{self.spec.slot}: starting again (attempt {self.failures + 1})")
            self.start()

    def healed_by(self, *, hand: bool) -> None:
        """Who heals it now; one that waited for a heal by hand waits for the coordinator's."""
        if self.by_hand and not hand and self.phase is Phase.STALE:
            self._enter(Phase.HEALING)
        self.by_hand = hand

    def forgive(self) -> None:
        """Forget its failures: it is tried again at once."""
        self.error = None
        self.failures = 0
        self._again_at = 0.0
        self._recent.forget()

    # What becomes of it.

    def advance(self, stage: Stage | None, *, idle: bool = False) -> None:
        """Do what can be done now. ``stage``: what the coordinator knows of the slot; ``idle``: nothing runs on it."""
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
                    self._told = False
                    self._enter(Phase.HEALING)
                else:
                    self._remind("loading")
                    self._limit(self.limits.load_s, "it did not load")
            case Phase.HEALING | Phase.STALE:
                facts = self.leader.facts
                here = stage is not None and stage.registration.address == facts["address"]
                if stage is not None and here and stage.routable:
                    self._say(f"{self.spec.slot}: ready at {facts['address']}, rollout at {facts['rollout_address']}")
                    self._enter(Phase.READY)
                elif self.phase is Phase.STALE:
                    self._refuse_lost(stage)
                elif here and (lifted_by := self._held_by_operator(stage)):
                    assert stage is not None
                    self._say(f"{self.spec.slot}: up, {stage.not_routable}; `{lifted_by}` lets it serve")
                    self._enter(Phase.READY)
                elif here and (waits_for := self._waits_for(stage)):
                    self._say(f"{self.spec.slot}: up, stale, waits for {waits_for}")
                    self._enter(Phase.STALE)
                else:
                    why = (stage.not_routable if stage is not None else "") or "not registered"
                    if not self._told and time.monotonic() - self._since > TELL_S:
                        self._say(f"{self.spec.slot}: loaded, healing ({why})")
                        self._told = True
                    self._remind(f"healing ({why})")
                    self._limit(self.limits.heal_s, "not routable", why)
            case Phase.READY:
                self._refuse_lost(stage)
                if time.monotonic() - self._since > STEADY_S:
                    self.failures = 0
            case Phase.DRAINING:
                # Twice, as a client that picked it just before may still be on its way.
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

    @property
    def leader(self) -> Launched:
        """The process of rank 0."""
        return next(process for process in self.processes if process.name == self.spec.slot)

    def failure(self, *, restart: bool) -> EngineFailure | None:
        """What has become of it, for the coordinator, until it is up again; a process that has ended says nothing.

        ``restart``: it is started again when its back-off is over.
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
        """Whether it has failed, and is not started again by itself: only by an operator."""
        return self.phase is Phase.FAILED and self._recent.exceed(self.limits.restarts)

    @property
    def _may_start(self) -> bool:
        return time.monotonic() >= self._again_at and not self.given_up

    @property
    def again_in_s(self) -> float:
        """After a failure: seconds until it is tried again."""
        return max(0.0, self._again_at - time.monotonic())

    def _launch(self, rank: int, followers: Sequence[str] = ()) -> None:
        self.processes.append(self._launcher.launch(self.spec, rank, self._coordinator, followers))

    def _ended(self) -> Launched | None:
        return next((process for process in self.processes if process.returncode is not None), None)

    def _waits_for(self, stage: Stage | None) -> str:
        """What a stale engine waits for that another start would not bring, or ""."""
        if stage is None or stage.state != STAGE_STATE_STALE or time.monotonic() - self._since <= STALE_S:
            return ""
        if self.by_hand:
            return f"a heal by hand: rlctl heal {self.spec.slot}"
        return f"the trainer's next update ({stage.not_routable})" if stage.unhealable else ""

    def _held_by_operator(self, stage: Stage | None) -> str:
        """The command that lifts what an operator holds against a stage which is otherwise ready, or ""."""
        disabled = stage is not None and not stage.enabled and stage.disabled_reason != REPLACED
        if stage is not None and stage.state == STAGE_STATE_READY and disabled:
            return f"rlctl enable {self.spec.slot}"
        if stage is not None and stage.state == STAGE_STATE_PAUSED and not stage.report.paused_by_update:
            return f"rlctl continue --slot {self.spec.slot}"
        return ""

    def _refuse_lost(self, stage: Stage | None) -> None:
        """A stage server whose engine is gone, and that cannot start it again, holds its slot in vain."""
        if stage is None or self.spec.restarts_itself or stage.registration.address != self.leader.facts["address"]:
            return
        lost = next((rank for rank in stage.report.ranks if not rank.alive), None)
        if lost is None:
            return
        why = f"{self.spec.slot} has lost rank {lost.coordinates.rank}: {lost.reason}"
        self._fail(Reason.ENGINE_FAILED.error(why, next_step=f"See {self.leader.log}."))

    def _remind(self, what: str) -> None:
        """Say that it goes on, and what the process that it waits for has logged last."""
        since_s = time.monotonic() - self._since
        if since_s < self._remind_s:
            return
        self._remind_s *= 2
        waiting = next((process for process in self.processes if not process.serves), self.processes[-1])
        said = waiting.said()
        self._say(f"{self.spec.slot}: still {what} after {since_s:.0f} s" + (f"; its log says: {said}" if said else ""))

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
        pause_s = min(self.limits.backoff_s * 2**self.failures, BACKOFF_AT_MOST_S)
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
        """Forget what has ended, kill what does not end; returns whether something is left."""
        late = time.monotonic() - self._since > STOP_S
        for process in list(self.processes):
            if process.returncode is None and late:
                self._say(f"{process.name} (pid {process.pid}) did not end in {STOP_S:g} s and was killed; "
                          f"see {process.log}")  # fmt: skip
                process.kill()
            if process.returncode is not None or late:
                process.wait()
                self.processes.remove(process)
        return bool(self.processes)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since = time.monotonic()
        self._remind_s = REMIND_S


def _loading(spec: EngineSpec) -> str:
    where = f" at {spec.options['url']}" if spec.attached else ""
    parallel = f"TP {spec.tp_size}" + (f", PP {spec.pp_size}" if spec.pp_size > 1 else "")
    return f"loading {spec.model_path} (engine {spec.engine}{where}, {parallel})"
