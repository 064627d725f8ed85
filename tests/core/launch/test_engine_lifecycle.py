"""An engine's life, with processes that the test is: started, drained, failed, tried again with back-off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from children import Child, Children

from rlctl.contract.errors import Reason
from rlctl.launch import engine_lifecycle
from rlctl.launch.engine_lifecycle import REPLACED, EngineRun, Limits, Phase, backoff_of
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.local.child_processes import last_line, log_end
from rlctl.launch.local.gpus import gpu_count
from rlctl.runtime.restart_limit import RestartLimit
from rlctl.stage import server
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY, STAGE_STATE_PAUSED, STAGE_STATE_READY, STAGE_STATE_STALE, StageState
from rlctl.v1.fleet_pb2 import Stage, StageReport


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``clock(3)``: three seconds later."""
    now = [100.0]
    monkeypatch.setattr(engine_lifecycle.time, "monotonic", lambda: now[0])

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


SPEC = EngineSpec("a", "/m", tp_size=2)
READY = Stage(routable=True)
READY.registration.address = "at a"


def started(children: Children, said: list[str], limits: Limits | None = None, *, by_hand: bool = False) -> EngineRun:
    run = EngineRun(SPEC, children, "c", limits or Limits(), said.append, by_hand=by_hand)
    run.start()
    return run


def brought_up(run: EngineRun, children: Children) -> None:
    for _ in children.all[0].name, *run.spec.followers:
        children.all[-1].announce()
        run.advance(None)
    run.advance(READY)
    assert run.phase is Phase.READY


def test_an_engine_that_nobody_heals_is_up_and_waits_for_a_heal_by_hand(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(heal_s=5), by_hand=True)
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stale = Stage(not_routable="STALE", state=STAGE_STATE_STALE)
    run.advance(stale)
    clock(3)
    run.advance(stale)
    assert run.phase is Phase.HEALING, "this is what filled the slot before"
    stale.registration.address = "at a"
    run.advance(stale)
    assert run.phase is Phase.STALE
    assert said[-1] == "a: up, stale, waits for a heal by hand: rlctl heal a"
    clock(1000)
    run.advance(stale)
    assert (run.phase, run.error) == (Phase.STALE, None), "it waits as long as it takes"
    run.advance(READY)
    assert run.phase is Phase.READY


def test_the_cause_is_that_of_rank_zero_although_its_follower_ends_first(clock: Callable[[float], None]) -> None:
    """Rank 0 cannot load, and tells its followers to end: `ended with 0` would be all that an operator sees."""
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    follower = children.all[-1]
    follower.announce()
    run.advance(None)
    rank_zero = children.all[-1]
    follower.returncode = 0
    run.advance(None)
    assert run.phase is Phase.LOADING
    rank_zero.returncode = 2
    run.advance(None)
    assert run.phase is Phase.FAILED
    assert run.error is not None
    assert run.error.message.startswith("a ended with 2")


def test_a_follower_that_ends_alone_is_a_failure(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    brought_up(run, children)
    children.all[0].returncode = 0
    run.advance(READY)
    assert run.phase is Phase.READY
    clock(engine_lifecycle.CAUSE_S)
    run.advance(READY)
    assert run.error is not None
    assert run.error.message.startswith("a.1 ended with 0")


def test_an_engine_that_nothing_can_heal_waits_for_an_update(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(heal_s=5))
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stale = Stage(not_routable="STALE, UNHEALABLE: no source", state=STAGE_STATE_STALE, unhealable=True)
    stale.registration.address = "at a"
    run.advance(stale)
    clock(3)
    run.advance(stale)
    assert said[-1] == "a: up, stale, waits for the trainer's next update (STALE, UNHEALABLE: no source)"
    clock(1000)
    run.advance(stale)
    assert (run.phase, run.error) == (Phase.STALE, None), "another start would not bring a source"
    run.advance(READY)
    assert run.phase is Phase.READY


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        (Stage(not_routable="disabled", state=STAGE_STATE_READY, disabled_reason="a new disk"), "rlctl enable a"),
        (Stage(not_routable="PAUSED", state=STAGE_STATE_PAUSED, enabled=True), "rlctl continue --slot a"),
    ],
    ids=["disabled", "paused"],
)
def test_an_engine_that_an_operator_holds_back_is_up_and_says_what_lifts_it(
    stage: Stage, command: str, clock: Callable[[float], None]
) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(heal_s=5))
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stage.registration.address = "at a"
    run.advance(stage)
    assert run.phase is Phase.READY
    assert command in said[-1]
    clock(6)
    run.advance(stage)
    assert run.phase is Phase.READY, "it has not failed to become routable"


@pytest.mark.parametrize(
    "stage",
    [
        Stage(state=STAGE_STATE_PAUSED, enabled=True, report=StageReport(paused_by_update="u")),
        Stage(state=STAGE_STATE_READY, disabled_reason=REPLACED),
    ],
    ids=["paused by an update", "disabled by the supervisor"],
)
def test_what_ends_by_itself_is_waited_for(stage: Stage, clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stage.registration.address = "at a"
    run.advance(stage)
    assert run.phase is Phase.HEALING


@pytest.mark.parametrize(("by_hand", "state"), [(False, STAGE_STATE_STALE), (True, STAGE_STATE_DIRTY)])
def test_any_other_engine_that_is_not_routable_in_time_has_failed(
    clock: Callable[[float], None], by_hand: bool, state: StageState.ValueType
) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(heal_s=5), by_hand=by_hand)
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stuck = Stage(not_routable="it is not", state=state)
    stuck.registration.address = "at a"
    clock(6)
    run.advance(stuck)
    assert run.phase is Phase.FAILED


def test_an_engine_that_waits_for_a_heal_and_dies_is_started_again(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, by_hand=True)
    for _ in range(2):
        children.all[-1].announce()
        run.advance(None)
    stale = Stage(state=STAGE_STATE_STALE)
    stale.registration.address = "at a"
    clock(3)
    run.advance(stale)
    children.all[0].returncode = 1
    run.advance(stale)
    assert run.phase is Phase.FAILED


def test_rank_zero_is_started_when_its_followers_listen_and_serves_when_it_is_routable(
    clock: Callable[[float], None],
) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    run.advance(None)
    assert (run.phase, [child.name for child in children.all]) == (Phase.STARTING, ["a.1"])
    children.all[0].announce()
    run.advance(None)
    assert run.phase is Phase.LOADING
    assert children.all[1].arguments[-2:] == ["--follower", "at a.1"]
    children.all[1].announce()
    run.advance(None)
    stale = Stage(not_routable="STALE")
    stale.registration.address = "at a"
    clock(1.5)
    run.advance(stale)
    assert run.phase is Phase.HEALING
    assert said[-1] == "a: loaded, healing (STALE)"
    other = Stage(routable=True)
    other.registration.address = "what filled the slot before"
    run.advance(other)
    assert run.phase is Phase.HEALING
    run.advance(READY)
    assert run.phase is Phase.READY
    assert said[-1] == "a: ready at at a, rollout at r"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.HEALING])
def test_what_takes_too_long_fails_with_its_reason_and_log(phase: Phase, clock: Callable[[float], None]) -> None:
    children = Children()
    run = started(children, [], Limits(start_s=10, load_s=10, heal_s=10))
    while run.phase is not phase:
        children.all[-1].announce()
        run.advance(None)
    clock(11)
    run.advance(None)
    assert run.phase is Phase.FAILED
    assert run.error is not None
    assert run.error.reason is Reason.DEADLINE_EXCEEDED
    assert "/logs/a" in run.error.next_step
    assert all(child.returncode is not None for child in children.all)


def test_people_are_told_that_an_engine_still_loads_and_what_its_log_says(
    clock: Callable[[float], None],
) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    assert said == ["a: starting 1 follower rank, then rank 0"]
    children.all[0].announce()
    run.advance(None)
    children.all[1].last = "shard 3 of 7"
    said.clear()
    for _ in range(45):
        clock(1)
        run.advance(None)
    assert said == [f"a: still loading after {after} s; its log says: shard 3 of 7" for after in (10, 20, 40)]


def test_what_a_process_said_is_not_what_one_before_it_said(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("the one before ended\n")
    before = log_end(log)
    assert last_line(log) == "the one before ended"
    assert last_line(log, before) == ""
    log.write_text("the one before ended\none\nshard 3 of 7\n\n")
    assert last_line(log, before) == "shard 3 of 7"
    assert (log_end(tmp_path / "none"), last_line(tmp_path / "none")) == (0, "")


@pytest.mark.parametrize(
    ("spec", "phase"),
    [
        (EngineSpec("a", "/m"), Phase.FAILED),
        (EngineSpec("a", "/m", engine="vllm", options={"url": "http://there"}), Phase.FAILED),
        (EngineSpec("a", "/m", engine="vllm"), Phase.READY),
    ],
    ids=["in the process", "attached", "launched"],
)
def test_an_engine_that_is_gone_while_its_process_lives_is_started_again_unless_that_does_it(
    spec: EngineSpec, phase: Phase
) -> None:
    children = Children()
    run = EngineRun(spec, children, "c", Limits(), lambda _: None)
    run.start()
    brought_up(run, children)
    gone = Stage()
    gone.registration.address = "what filled the slot before"
    gone.report.ranks.add(reason="vLLM does not answer")
    run.advance(gone)
    assert run.phase is Phase.READY
    gone.registration.address = "at a"
    run.advance(gone)
    assert run.phase is phase
    if phase is Phase.FAILED:
        assert str(run.error).startswith("ENGINE_FAILED: a has lost rank 0: vLLM does not answer. See /logs/a.log")
        assert children.all[0].returncode is not None


def test_who_knows_why_an_engine_does_not_load_gives_up_first() -> None:
    """The engine's own limit (start_s of a server, 900 s) and the stage server's must be over before the launcher's."""
    assert Limits().load_s > server.START_S > 900


def test_a_failure_of_weeks_has_the_longest_pause() -> None:
    assert [backoff_of(0.5, failures) for failures in (0, 3, 1000, 100_000)] == [0.5, 4.0, 60.0, 60.0]


def test_an_engine_that_ends_is_tried_again_with_longer_and_longer_pauses(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(backoff_s=1))
    brought_up(run, children)
    pauses = []
    for _ in range(8):
        next(child for child in children.all if child.returncode is None).returncode = -9  # a follower, say
        run.advance(READY)
        assert run.phase is Phase.FAILED
        assert run.error is not None
        assert "ended with -9" in run.error.message
        failure = run.failure(restart=True)
        assert failure is not None
        assert (failure.reason, failure.failures) == (run.error.message, len(pauses) + 1)
        assert failure.since.seconds <= failure.retry_time.seconds
        assert list(failure.log) == ["loading", "no memory"]
        without = run.failure(restart=False)
        assert without is not None
        assert not without.HasField("retry_time")
        pauses.append(run.again_in_s)
        clock(pauses[-1] - 0.1)
        run.again()
        assert run.phase is Phase.FAILED, "too early"
        clock(0.2)
        run.again()
        assert run.phase is Phase.STARTING
        brought_up(run, children)
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])
    assert run.failure(restart=True) is None, "it is up"
    clock(61)
    run.advance(READY)
    assert run.failures == 0, "it was steady for a minute"


def failed_again(run: EngineRun, children: Children, clock: Callable[[float], None], after_s: float) -> None:
    """It was ready for so long, and ends."""
    clock(after_s)
    run.advance(READY)
    next(child for child in children.all if child.returncode is None).returncode = -9
    run.advance(READY)
    assert run.phase is Phase.FAILED


def test_an_engine_that_has_failed_too_often_is_left_until_an_operator_wants_it(clock: Callable[[float], None]) -> None:
    children = Children()
    run = started(children, [], Limits(restarts=RestartLimit(3, 600.0)))
    brought_up(run, children)
    for number in range(4):
        failed_again(run, children, clock, 1)
        assert run.given_up == (number == 3)
        if not run.given_up:
            clock(run.again_in_s + 0.1)
            run.again()
            brought_up(run, children)
    clock(10_000)
    run.again()
    assert run.phase is Phase.FAILED
    failure = run.failure(restart=True)
    assert failure is not None
    assert (failure.given_up, failure.failures, failure.HasField("retry_time")) == (True, 4, False)
    assert failure.log == ["loading", "no memory"]
    never = run.failure(restart=False)
    assert never is not None
    assert not never.given_up, "a fleet that starts nothing again has no limit"
    run.forgive()
    run.again()
    assert run.phase is Phase.STARTING
    brought_up(run, children)
    failed_again(run, children, clock, 1)
    assert not run.given_up


@pytest.mark.parametrize(("within_s", "restarts", "given_up"), [(600.0, 3, True), (200.0, 3, False), (600.0, 0, False)])
def test_an_engine_that_fails_slowly_again_and_again_counts_by_the_time_of_the_limit(
    clock: Callable[[float], None], within_s: float, restarts: int, given_up: bool
) -> None:
    children = Children()
    run = started(children, [], Limits(restarts=RestartLimit(restarts, within_s)))
    brought_up(run, children)
    for _ in range(4):
        failed_again(run, children, clock, 90)
        assert run.failures == 1, "it was steady in between"
        clock(2)
        run.again()
        if run.phase is Phase.STARTING:
            brought_up(run, children)
    assert (run.phase is Phase.FAILED) == run.given_up == given_up


def test_a_drained_engine_is_stopped_when_nothing_runs_on_it(clock: Callable[[float], None]) -> None:
    children = Children()
    run = started(children, [])
    brought_up(run, children)
    run.drain()
    for idle in (True, False, True):
        run.advance(READY, idle=idle)
        assert run.phase is Phase.DRAINING
    run.advance(READY, idle=True)
    assert run.phase is Phase.STOPPING
    run.advance(None)
    assert run.phase is Phase.GONE


def test_requests_that_do_not_end_are_not_waited_for_for_ever(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said, Limits(drain_s=5))
    brought_up(run, children)
    run.drain()
    clock(6)
    run.advance(READY, idle=False)
    assert run.phase is Phase.STOPPING
    assert "requests or an update still run after 5 s" in said[-1]


def test_what_does_not_end_is_killed(clock: Callable[[float], None]) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    brought_up(run, children)
    for child in children.all:
        child.terminate = lambda: None  # type: ignore[method-assign]
    run.stop()
    run.advance(None)
    assert run.phase is Phase.STOPPING
    clock(11)
    run.advance(None)
    assert run.phase is Phase.GONE
    assert len([line for line in said if "was killed" in line]) == 2


class Undying(Child):
    """A process in a system call that does not return."""

    def __init__(self, name: str) -> None:
        super().__init__(name, [])
        self.kills = 0

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout_s: float = 10, killed_s: float = 5) -> bool:
        assert timeout_s + killed_s == 0 or self.returncode is not None, "a wait stops the only loop of the supervisor"
        return True


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("phase", [Phase.STOPPING, Phase.FAILED])
def test_a_process_that_no_kill_ends_is_reported_and_looked_at_until_it_ends(
    clock: Callable[[float], None], phase: Phase, restart: bool
) -> None:
    children, said = Children(), []  # type: ignore[var-annotated]
    run = started(children, said)
    brought_up(run, children)
    undying = Undying("a.1")
    run.processes[0] = undying

    def look() -> None:
        run.advance(READY)
        if restart:
            run.again()

    if phase is Phase.STOPPING:
        run.stop()
    else:
        run.processes[1].returncode = -9
        look()
    count = len(children.all)
    for _ in range(40):
        clock(0.5)
        look()
    assert run.phase is phase
    assert (undying.kills > 0, len(children.all)) == (True, count)
    assert len([line for line in said if "a.1 (pid 1) did not end in 10 s and was killed" in line]) == 1
    assert run.error is not None
    assert run.error.message == "a.1 (pid 1) was killed and has not ended"
    assert not run.retries
    run.forgive()
    look()
    assert run.error is not None, "the next change is answered too"
    undying.returncode = -9
    look()
    expected = Phase.GONE if phase is Phase.STOPPING else Phase.STARTING if restart else Phase.FAILED
    assert run.phase is expected
    assert undying not in run.processes


def test_gpus_are_counted_by_their_device_files_and_hidden_by_the_environment(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_count({}, tmp_path) == 3
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert gpu_count({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tmp_path) == 1
    assert gpu_count({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
