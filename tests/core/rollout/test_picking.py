"""Which stage a sample goes to: policies, the ring, sessions, admission, and stages that are left alone for a while."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.picking.admission import Admission, max_staleness, parse
from rlctl.rollout.picking.candidates import Candidates
from rlctl.rollout.picking.hash_ring import Ring
from rlctl.rollout.picking.health import FAILED_S, REFUSED_S, Health
from rlctl.rollout.picking.policies import POLICIES, ConsistentHashing, policy
from rlctl.rollout.picking.router import Router, Wanted, next_step, obstacles
from rlctl.rollout.picking.sessions import BOUND, Sessions
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
    STAGE_STATE_UNREACHABLE,
    TRANSPORT_SHARED_MEMORY,
    WORKER_TYPE_DECODE,
    WORKER_TYPE_PREFILL,
    WORKER_TYPE_REGULAR,
    StageState,
    WeightVersion,
    WorkerCoordinates,
    WorkerType,
)
from rlctl.v1.fleet_pb2 import Capabilities, Model, Stage, StageLayout, StageRegistration, StageReport
from rlctl.v1.verbs_pb2 import Adapter

SLOTS = st.lists(st.text("abcdef0123", min_size=1, max_size=3), min_size=1, max_size=8, unique=True)


def stage(
    slot: str,
    *,
    version: int = 1,
    state: StageState.ValueType = STAGE_STATE_READY,
    model: str = "actor",
    adapter: str = "",
    incarnation: int = 1,
    revision: int = 1,
    kind: WorkerType.ValueType = WORKER_TYPE_REGULAR,
    host: str = "h",
    engine: str = "torch",
) -> Stage:
    routable = state == STAGE_STATE_READY
    return Stage(
        registration=StageRegistration(
            slot=slot,
            model=model,
            engine=engine,
            worker_type=kind,
            capabilities=Capabilities(kv_transports=[TRANSPORT_SHARED_MEMORY] if engine == "torch" else []),
            layout=StageLayout(workers=[WorkerCoordinates(host_id=host)]),
        ),
        incarnation=incarnation,
        state=state,
        enabled=True,
        routable=routable,
        not_routable="" if routable else StageState.Name(state).removeprefix("STAGE_STATE_"),
        report=StageReport(
            weight_version=WeightVersion(sequence=version),
            revision=revision,
            adapters=[Adapter(name=adapter)] if adapter else [],
        ),
    )


def model(*admitted: int) -> Model:
    versions = [WeightVersion(sequence=sequence) for sequence in admitted]
    return Model(name="actor", latest=versions[-1], admitted=versions)


def test_who_may_be_picked_is_of_the_model_enabled_there_and_of_its_kind() -> None:
    off = stage("off")
    off.enabled = False
    gone = stage("gone", state=STAGE_STATE_UNREACHABLE)
    prompts = [
        stage("p", kind=WORKER_TYPE_PREFILL),
        stage("q", kind=WORKER_TYPE_PREFILL, state=STAGE_STATE_UNREACHABLE),
    ]
    stages = [stage("z"), stage("paused", state=STAGE_STATE_PAUSED), off, gone, *prompts, stage("ref", model="ref")]
    ours = Candidates(stages, "actor")
    assert [each.slot for each in ours.all] == ["gone", "off", "p", "paused", "q", "z"]
    assert (ours.members, ours.prefill_members, ours.paired) == (["paused", "z"], ["p"], True)
    assert Candidates(stages, "").members == ["paused", "ref", "z"]
    assert not Candidates(stages, "ref").paired


def test_data_routes_are_those_that_every_stage_of_the_model_has() -> None:
    def with_port(
        slot: str, *routes: str, kind: WorkerType.ValueType = WORKER_TYPE_REGULAR, address: str = "h:1"
    ) -> Stage:
        made = stage(slot, kind=kind)
        made.registration.data_address = address
        made.registration.data_routes.extend(routes)
        return made

    generate, embed = "POST /generate", "POST /v1/embeddings"
    both, one = with_port("a", generate, embed), with_port("b", generate)
    assert Candidates([both, one, stage("ref", model="ref")], "actor").data_routes == {generate}
    assert Candidates([both], "actor").data_routes == {generate, embed}
    for other in (stage("c"), with_port("c", generate, address=""), with_port("c", generate, kind=WORKER_TYPE_DECODE)):
        assert not Candidates([both, other], "actor").data_routes
    assert not Candidates([], "actor").data_routes


def test_one_that_is_preferred_is_picked_as_long_as_it_may_be_asked() -> None:
    router = Router(policy("round_robin", session_idle_s=1.0))
    stages = [stage("a"), stage("b")]
    wanted = Wanted("actor", preferred="a")
    for _ in range(3):
        picked = router.pick(stages, wanted, 0.0)
        assert picked is not None
        assert picked.slot == "a"
    router.failed(picked, Reason.ENGINE_FAILED.error(), 0.0)
    elsewhere = router.pick(stages, wanted, 0.0)
    assert elsewhere is not None
    assert elsewhere.slot == "b", "the first is left alone for a while"
    for others in ([stage("a", state=STAGE_STATE_PAUSED), stage("b")], [stage("b")]):
        other = router.pick(others, wanted, 0.0)
        assert other is not None
        assert other.slot == "b"


# Admission.


@pytest.mark.parametrize(
    ("admission", "admitted", "least"),
    [
        ("latest", [5], 5),
        ("latest", [4, 5], 4),  # while an update rolls, either
        ("any", [5], 0),
        ("max_staleness=0", [4, 5], 5),
        ("max_staleness=2", [5], 3),
    ],
)
def test_the_least_version_that_an_admission_allows(admission: str, admitted: list[int], least: int) -> None:
    assert parse(admission).floor(model(*admitted)) == max(least, 0)
    assert parse(admission).floor(model(*admitted), min_version=9) == 9
    assert parse(admission).floor(None, min_version=3) == 3


def test_an_admission_that_does_not_exist_is_refused() -> None:
    assert parse(max_staleness(3)) == parse("max_staleness=3") == Admission("max_staleness", 3)
    for wrong in ("newest", "max_staleness", "max_staleness=-1", ""):
        with pytest.raises(RlctlError) as caught:
            parse(wrong)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "admission")
    with pytest.raises(RlctlError):
        max_staleness(-1)


# The ring and the sessions on it.


@given(SLOTS, st.text(max_size=8))
def test_a_walk_meets_every_slot_once(slots: list[str], key: str) -> None:
    assert sorted(Ring(slots).walk(key)) == sorted(slots)


@given(SLOTS, st.text(max_size=8), st.data())
def test_a_slot_that_goes_changes_the_order_of_no_others(slots: list[str], key: str, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(slots))
    assert [s for s in Ring(slots).walk(key) if s != gone] == list(Ring(set(slots) - {gone}).walk(key))


def test_a_ring_gives_each_slot_about_its_share() -> None:
    ring = Ring("abcdefgh")
    shares = Counter(next(ring.walk(str(key))) for key in range(8000))
    assert max(shares.values()) < 1400
    assert min(shares.values()) > 700


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=120))
def test_no_slot_has_more_sessions_than_the_bound_when_it_takes_one(slots: int, steps: list[tuple[int, bool]]) -> None:
    names = [f"s{number}" for number in range(slots)]
    sessions = Sessions(idle_s=1e9)
    living: set[str] = set()
    for number, ends in steps:
        session = str(number)
        if ends:
            sessions.finish(session)
            living.discard(session)
            continue
        new = session not in living
        living.add(session)
        slot = sessions.pick(session, names, names, now=0.0)
        assert sessions.home(session) == slot
        assert sum(sessions.count.values()) == len(living)
        if new:
            assert sessions.count[slot] <= math.ceil(BOUND * len(living) / slots)


def test_a_join_moves_about_its_share_of_the_sessions_and_a_leave_only_those_of_the_one_that_left() -> None:
    sessions, four, five = Sessions(idle_s=1e9), list("abcd"), list("abcde")
    ids = [f"session {number}" for number in range(2000)]
    before = {s: sessions.pick(s, four, four, 0.0) for s in ids}
    assert all(sessions.pick(s, four, four, 0.0) == before[s] for s in ids)
    after = {s: sessions.pick(s, five, five, 0.0) for s in ids}
    moved = [s for s in ids if after[s] != before[s]]
    assert 0.12 < len(moved) / len(ids) < 0.35
    assert max(sessions.count.values()) <= math.ceil(BOUND * len(ids) / 5) + 1
    left = {s: sessions.pick(s, list("acde"), list("acde"), 0.0) for s in ids}
    others = [s for s in ids if after[s] != "b"]
    assert sum(left[s] != after[s] for s in others) / len(others) < 0.2
    assert "b" not in left.values()


def test_a_member_that_is_paused_for_a_moment_keeps_its_sessions() -> None:
    sessions, members = Sessions(idle_s=1e9), list("abc")
    homes = {str(n): sessions.pick(str(n), members, members, 0.0) for n in range(60)}
    for session, home in homes.items():
        elsewhere = sessions.pick(session, [s for s in members if s != home], members, 0.0)
        assert elsewhere != home
        assert sessions.pick(session, members, members, 0.0) == home


def test_sessions_that_were_idle_or_have_finished_are_forgotten() -> None:
    sessions = Sessions(idle_s=10)
    sessions.pick("one", "ab", "ab", now=0.0)
    sessions.pick("two", "ab", "ab", now=1.0)
    sessions.pick("one", "ab", "ab", now=9.0)
    sessions.pick("three", "ab", "ab", now=11.0)
    assert (sessions.home("one") != "", sessions.home("two")) == (True, "")
    sessions.finish("one")
    sessions.finish("nobody's")
    assert sum(sessions.count.values()) == 1
    with pytest.raises(RlctlError, match="above 0"):
        Sessions(idle_s=0)


# Policies.


def test_policies_by_name() -> None:
    for name in POLICIES:
        assert policy(name, session_idle_s=1).pick(["a"], ["a"], "", {}, 0.0) == "a"
    with pytest.raises(RlctlError, match="least_connections, round_robin, consistent_hashing") as caught:
        policy("random", session_idle_s=1)
    assert caught.value.field == "policy"


def test_least_connections_evens_out_and_takes_turns_among_equals() -> None:
    router = Router(policy("least_connections", session_idle_s=1))
    stages = [stage(slot) for slot in "abc"]
    picked = [router.pick(stages, Wanted(), 0.0) for _ in range(6)]
    assert Counter(p.slot for p in picked if p) == {"a": 2, "b": 2, "c": 2}
    for p in picked:
        if p is not None and p.slot == "b":
            router.end(p)
    again = [router.pick(stages, Wanted(), 0.0) for _ in range(2)]
    assert [p.slot for p in again if p] == ["b", "b"]


def test_hashing_without_a_session_goes_by_load() -> None:
    hashing = ConsistentHashing(idle_s=1)
    assert hashing.pick(["a", "b"], ["a", "b"], "", {"a": 3}, 0.0) == "b"
    assert not hashing.sessions.count


# The router.


def test_only_what_may_serve_it_gets_a_request() -> None:
    router = Router(policy("round_robin", session_idle_s=1))
    stages = [stage("a", version=3), stage("b", version=4, state=STAGE_STATE_PAUSED), stage("c", model="ref")]

    def slot(**wanted: object) -> str:
        picked = router.pick(stages, Wanted(**wanted), 0.0)  # type: ignore[arg-type]
        return picked.slot if picked else ""

    assert slot(model="actor") == "a"
    assert slot(model="actor", floor=4) == ""
    assert slot(slot="c") == "c"
    assert slot(slot="b") == ""
    assert obstacles(stages, Wanted("actor", floor=4)) == "a at version 3 of 4, b PAUSED"
    assert obstacles(stages, Wanted("actor", slot="d")) == "there is no stage 'd'"
    stages = [*stages, stage("d", adapter="math")]
    assert {slot(adapter="math") for _ in range(4)} == {"d"}


def test_a_stage_that_is_away_is_no_member_and_one_that_is_paused_is() -> None:
    hashing = ConsistentHashing(idle_s=1e9)
    router = Router(hashing)
    up = [stage(slot) for slot in "abc"]
    homes = {}
    for number in range(30):
        picked = router.pick(up, Wanted(session=str(number)), 0.0)
        assert picked is not None
        homes[str(number)] = picked.slot
    router.pick([stage("a", state=STAGE_STATE_PAUSED), *up[1:]], Wanted(session="0"), 0.0)
    assert {s: hashing.sessions.home(s) for s in homes} == homes
    gone = [stage("a", state=STAGE_STATE_UNREACHABLE), *up[1:]]
    for session in homes:
        router.pick(gone, Wanted(session=session), 0.0)
    assert "a" not in {hashing.sessions.home(s) for s in homes}


# What refuses or fails is left alone for a while.


def fast_health() -> Health:
    return Health(jitter=lambda: 0.0)


def test_a_stage_that_refused_is_asked_again_by_one_request_at_a_time() -> None:
    router = Router(policy("round_robin", session_idle_s=1), fast_health())
    stages = [stage("a")]
    sent = [router.pick(stages, Wanted(), 0.0) for _ in range(100)]
    for picked in sent:
        assert picked is not None
        assert router.failed(picked, Reason.STAGE_NOT_SERVING.error(), 0.001)
        router.end(picked)
    asked, now, step = 0, 0.001, 0.001
    while now < 5:
        now += step
        for _ in range(100):  # a hundred requests wait for it
            picked = router.pick(stages, Wanted(), now)
            if picked is not None:
                asked += 1
                router.failed(picked, Reason.STAGE_NOT_SERVING.error(), now)
                router.end(picked)
    assert 5 < asked < 20, "about one per pause, and the pauses double up to half a second"
    # What the coordinator tells of the stage ends it at once.
    assert router.pick([stage("a", revision=2)], Wanted(), now) is not None


def test_a_stage_that_fails_is_avoided_until_it_has_answered_or_restarted() -> None:
    router = Router(policy("round_robin", session_idle_s=1), fast_health())
    stages = [stage("a"), stage("b")]
    now = 0.0
    for _ in range(3):
        picked = router.pick([stages[0]], Wanted(), now)
        assert picked is not None
        router.failed(picked, Reason.UNREACHABLE.error(), now)
        router.end(picked)
        assert {p.slot for _ in range(4) if (p := router.pick(stages, Wanted(), now))} == {"b"}
        now += router.again_s(now)
    assert router.pick([stage("a", revision=7)], Wanted(), now - 0.01) is None, "a report says nothing of the way to it"
    assert router.pick([stage("a", incarnation=2)], Wanted(), now - 0.01) is not None


def test_one_answer_makes_a_stage_as_good_as_ever() -> None:
    health = fast_health()
    health.failed("a", 1, sent=0.0, now=0.0, error=Reason.UNREACHABLE.error())
    now = FAILED_S[0]
    assert not health.usable("a", 1, 1, now - 0.01)
    assert health.usable("a", 1, 1, now)
    health.trying("a", now)
    assert not health.usable("a", 1, 1, now)
    health.answered("a")
    assert health.usable("a", 1, 1, now)
    assert health.again_s(now) == math.inf


@given(st.lists(st.sampled_from(["refused", "failed"]), min_size=1, max_size=40))
def test_no_stage_is_left_alone_for_longer_than_the_bound(events: list[str]) -> None:
    health, now = Health(), 0.0
    for event in events:
        if event == "refused":
            health.refused("a", 1, 1, now, now, Reason.STAGE_NOT_SERVING.error())
        else:
            health.failed("a", 1, now, now, Reason.UNREACHABLE.error())
        wait = health.again_s(now)
        assert 0 < wait <= max(FAILED_S[1], REFUSED_S[1]) * 1.25
        now += wait + 1e-6
        assert health.usable("a", 1, 1, now)
        health.trying("a", now)


def test_errors_of_suitable_stages_are_kept_until_an_answer() -> None:
    router = Router(policy("round_robin", session_idle_s=1), fast_health())
    stages = [stage("a"), stage("b")]
    failure, refusal = Reason.TLS_FAILED.error("no handshake"), Reason.TOO_MANY_REQUESTS.error("full")
    for error in (failure, refusal):
        picked = router.pick(stages, Wanted(), 0.0)
        assert picked is not None
        assert router.failed(picked, error, 0.0), "the request goes elsewhere"
        router.end(picked)
    assert router.pick(stages, Wanted(), 0.0) is None
    assert router.failures(stages, Wanted()) == [(stages[0], failure), (stages[1], refusal)]
    assert router.failures(stages, Wanted(slot="b")) == [(stages[1], refusal)]
    assert router.failures(stages, Wanted(floor=2)) == []
    assert router.failures([stage("a", incarnation=2), stage("b", revision=2)], Wanted()) == []
    picked = router.pick(stages, Wanted(), FAILED_S[1])
    assert picked is not None
    router.answered(picked)
    assert picked.stage not in [each for each, _ in router.failures(stages, Wanted())]


def test_a_request_that_is_wrong_says_nothing_of_the_stage() -> None:
    router = Router(policy("round_robin", session_idle_s=1), fast_health())
    picked = router.pick([stage("a")], Wanted(), 0.0)
    assert picked is not None
    for reason in (Reason.FIELD_INVALID, Reason.PROMPT_TOO_LONG, Reason.MODEL_NOT_FOUND, Reason.DEADLINE_EXCEEDED):
        assert not router.failed(picked, reason.error(), 0.0)
    assert router.pick([stage("a")], Wanted(), 0.0) is not None


# Pairs.


def prefill(slot: str, **settings: Any) -> Stage:
    return stage(slot, kind=WORKER_TYPE_PREFILL, **settings)


def decode(slot: str, **settings: Any) -> Stage:
    return stage(slot, kind=WORKER_TYPE_DECODE, **settings)


def pairs_of(stages: list[Stage], wanted: Wanted, times: int = 12) -> set[tuple[str, str]]:
    """Every pair that the router picks, as (prefill, generating); "": the stage does both."""
    router = Router(policy("round_robin", session_idle_s=1), prefill=policy("round_robin", session_idle_s=1))
    found = set()
    for _ in range(times):
        picked = router.pick(stages, wanted, 0.0)
        if picked is not None:
            found.add(("" if picked.prefill is None else picked.prefill.registration.slot, picked.slot))
    return found


def test_a_decode_stage_is_picked_with_a_prefill_stage_and_neither_alone() -> None:
    both = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    assert pairs_of(both, Wanted("actor")) == {("p0", "d0"), ("p1", "d1")}
    assert pairs_of([*both[:1], *both[2:]], Wanted("actor")) == {("p0", "d0"), ("p0", "d1")}
    assert pairs_of(both[:2], Wanted("actor")) == pairs_of(both[2:], Wanted("actor")) == set()
    assert pairs_of([*both[1:3], stage("a")], Wanted("actor")) == {("p1", "d0"), ("", "a")}
    assert pairs_of([prefill("p0", model="ref"), *both[2:]], Wanted()) == set()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"version": 4}, {"version": 3}),
        ({"version": 3}, {"version": 4}),
        ({"host": "h"}, {"host": "other"}),
        ({"engine": "sglang"}, {"engine": "torch"}),
        ({"state": STAGE_STATE_PAUSED}, {}),
        ({}, {"state": STAGE_STATE_PAUSED}),
    ],
)
def test_a_pair_is_of_one_version_one_engine_and_one_host(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert pairs_of([prefill("p", **first), decode("d", **second)], Wanted("actor")) == set()


def test_what_is_wanted_is_wanted_of_both() -> None:
    rolling = [prefill("p3", version=3), prefill("p4", version=4), decode("d3", version=3), decode("d4", version=4)]
    assert pairs_of(rolling, Wanted("actor")) == {("p3", "d3"), ("p4", "d4")}
    assert pairs_of(rolling, Wanted("actor", floor=4)) == {("p4", "d4")}
    held = [prefill("p0"), prefill("p1", adapter="lora"), decode("d0", adapter="lora"), decode("d1")]
    assert pairs_of(held, Wanted("actor", adapter="lora")) == {("p1", "d0")}
    apart = [prefill("p0", engine="sglang", host="h"), decode("d0", engine="sglang", host="other")]
    assert pairs_of(apart, Wanted("actor")) == {("p0", "d0")}, "how SGLang's reach each other is not known here"


def test_one_that_is_named_is_one_of_the_pair() -> None:
    stages = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1"), stage("a")]
    assert pairs_of(stages, Wanted("actor", slot="p1")) == {("p1", "d0"), ("p1", "d1")}
    assert pairs_of(stages, Wanted("actor", slot="d0")) == {("p0", "d0"), ("p1", "d0")}
    assert pairs_of(stages, Wanted("actor", slot="d0", prefill="p1")) == {("p1", "d0")}
    apart = [prefill("p0", version=4), prefill("p1", version=3), decode("d0", version=4)]
    assert pairs_of(apart, Wanted("actor", slot="d0", prefill="p1")) == {("p0", "d0")}, "that one does not fit"
    assert pairs_of([stage("a")], Wanted("actor", prefill="p1")) == {("", "a")}
    assert pairs_of(stages, Wanted("actor", slot="a")) == {("", "a")}
    assert pairs_of(stages, Wanted("actor", slot="gone")) == set()


def test_a_policy_goes_by_the_loads_of_each_half() -> None:
    router = Router(policy("least_connections", session_idle_s=1))
    stages = [prefill("p0"), decode("d0"), decode("d1"), decode("d2")]
    picked = [router.pick(stages, Wanted("actor"), 0.0) for _ in range(6)]
    assert router.load == {"p0": 6, "d0": 2, "d1": 2, "d2": 2}
    for each in picked:
        assert each is not None
        router.end(each)
    assert set(router.load.values()) == {0}


def test_a_session_stays_at_both() -> None:
    homes = [policy("consistent_hashing", session_idle_s=9) for _ in range(2)]
    router = Router(homes[0], prefill=homes[1])
    stages = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]
    for session in ("one", "two", "three"):
        turns = [router.pick(stages, Wanted("actor", session=session), 0.0) for _ in range(5)]
        assert len({tuple(picked.slots) for picked in turns if picked is not None}) == 1
        router.finish(session)
    assert all(isinstance(home, ConsistentHashing) and not home.sessions.count.total() for home in homes)


def test_a_failure_holds_the_half_that_it_was_met_at() -> None:
    router = Router(
        policy("round_robin", session_idle_s=1), fast_health(), prefill=policy("round_robin", session_idle_s=1)
    )
    stages = [prefill("p0"), prefill("p1"), decode("d0")]
    picked = router.pick(stages, Wanted("actor"), 0.0)
    assert picked is not None
    assert picked.prefill is not None
    assert router.failed(picked, Reason.HANDOVER_FAILED.error("lost"), 0.0, at=picked.prefill)
    for _ in range(4):
        other = router.pick(stages, Wanted("actor"), 0.0)
        assert other is not None
        assert other.prefill is not None
        assert other.prefill.registration.slot != picked.prefill.registration.slot
    router.answered(picked)
    assert not router.failed(picked, Reason.PROMPT_TOO_LONG.error("it is"), 0.0)


def test_why_there_is_no_pair() -> None:
    stages = [prefill("p", version=3), decode("d", version=4), decode("e", state=STAGE_STATE_PAUSED)]
    assert obstacles(stages, Wanted("actor")) == "e PAUSED, d without a prefill stage that fits (p at version 3)"
    assert obstacles(stages[1:2], Wanted("actor")) == "d without a prefill stage that fits (none may be asked)"
    assert obstacles([prefill("p"), decode("d")], Wanted("actor")) == ""


def test_what_only_the_trainer_can_end_is_told_to_whoever_waits() -> None:
    wanted = Wanted("actor")
    healing, lost = stage("a", state=STAGE_STATE_STALE), stage("b", state=STAGE_STATE_STALE)
    lost.unhealable = True
    dirty, other = stage("c", state=STAGE_STATE_DIRTY), stage("d", state=STAGE_STATE_DIRTY, model="ref")
    for stages in ([], [healing], [stage("e", state=STAGE_STATE_PAUSED), other]):
        assert next_step(stages, wanted) == "", "it may end by itself"
    for stages in ([healing, lost], [dirty]):
        assert next_step(stages, wanted) == Reason.UNHEALABLE.next_step
