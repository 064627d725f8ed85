"""The stage's state follows from its facts, and no verb leaves it in a state that would serve what it must not."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.stage.facts import Facts, Weights
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    StageState,
    WeightVersion,
)
from rlctl.v1.results_pb2 import RankResult

EPOCH = 3


def version(sequence: int) -> WeightVersion:
    return WeightVersion(label=f"v{sequence}", sequence=sequence)


def fenced(request: Message, update_id: str = "") -> Message:
    request.header.fence.fleet_epoch = EPOCH
    request.header.fence.update_id = update_id
    return request


def apply(
    facts: Facts, request: Message, outcome: int = OUTCOME_APPLIED, *, update_id: str = "", released: tuple = ()
) -> bool:
    """What a stage does with a verb whose ranks all answer the same. Returns whether a fact may have changed."""
    fenced(request, update_id)
    verb = of_request(request)
    facts.refuse(verb, request)
    results = [RankResult(outcome=outcome, memory=v.MemoryReport(released=released))]
    return facts.settle(verb, request, outcome, results)


def refused(facts: Facts, request: Message, update_id: str = "") -> str:
    with pytest.raises(RlctlError) as caught:
        facts.refuse(of_request(request), fenced(request, update_id))
    return caught.value.reason.name


def state(facts: Facts) -> str:
    return StageState.Name(facts.state).removeprefix("STAGE_STATE_")


@pytest.fixture
def ready() -> Facts:
    facts = Facts(joined=True, fleet_epoch=EPOCH)
    facts.admit([version(1)], adopt=version(1))
    assert state(facts) == "READY"
    return facts


def update(facts: Facts, sequence: int = 2, *, kind: int = v.UPDATE_KIND_FULL) -> None:
    apply(facts, v.PrepareUpdateRequest(version=version(sequence), kind=kind), update_id="u")
    apply(facts, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    apply(facts, v.CommitUpdateRequest(version=version(sequence)), update_id="u")


def test_a_new_stage_joins_stale_and_is_ready_once_its_version_is_admitted() -> None:
    facts = Facts(fleet_epoch=EPOCH)
    assert state(facts) == "JOINING"
    facts.joined = True
    assert state(facts) == "STALE"
    facts.admit([version(1)], adopt=None)
    assert state(facts) == "STALE"
    facts.admit([version(1)], adopt=version(1))
    assert state(facts) == "READY"


def test_pause_and_continue(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert (state(ready), ready.pause_mode) == ("PAUSED", common.PAUSE_MODE_RETRACT)
    apply(ready, v.ContinueGenerationRequest())
    assert state(ready) == "READY"


def test_a_pause_of_unknown_outcome_counts_as_a_pause_and_an_unknown_continue_does_not(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest(), OUTCOME_UNKNOWN)
    assert state(ready) == "PAUSED"
    apply(ready, v.ContinueGenerationRequest(), OUTCOME_UNKNOWN)
    assert state(ready) == "PAUSED"


def test_a_refused_verb_changes_nothing(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest(), OUTCOME_REJECTED)
    assert state(ready) == "READY"


def test_an_update_serves_nothing_until_its_version_is_admitted(ready: Facts) -> None:
    update(ready)
    assert state(ready) == "UPDATING"
    ready.admit([version(1)], adopt=None)
    assert state(ready) == "UPDATING"
    ready.admit([version(2)], adopt=None)
    assert (state(ready), ready.version) == ("READY", version(2))


def test_a_finished_update_takes_no_more_writes(ready: Facts) -> None:
    update(ready)
    assert refused(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), "u") == "ILLEGAL_STATE"
    assert refused(ready, v.PrepareUpdateRequest(version=version(3)), "u") == "ILLEGAL_STATE"
    ready.refuse(of_request(v.AbortUpdateRequest()), fenced(v.AbortUpdateRequest(), "u"))


def test_what_an_update_writes_has_no_version_until_its_commit(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), OUTCOME_REJECTED, update_id="u")
    assert ready.version == version(1), "no rank has taken anything in"
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    assert ready.version == WeightVersion()
    assert refused(ready, v.ContinueGenerationRequest()) == "ILLEGAL_STATE", "it is the update's to end"


def test_an_update_whose_writes_were_all_refused_leaves_the_stage_as_it_was(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), OUTCOME_REJECTED, update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), ready.version) == ("READY", version(1))


def test_another_attempt_at_a_partial_update_may_begin_among_its_own_bytes(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2), kind=v.UPDATE_KIND_PARTIAL), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), OUTCOME_DIRTY, update_id="u")
    update(ready, kind=v.UPDATE_KIND_PARTIAL)
    ready.admit([version(2)], adopt=None)
    assert (state(ready), ready.version) == ("READY", version(2))


def test_an_update_that_ends_before_its_first_byte_leaves_the_stage_as_it_was(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), ready.version) == ("READY", version(1))


def test_what_was_generated_before_an_update_may_be_told_until_another_version_is_admitted(ready: Facts) -> None:
    assert ready.vouched
    update(ready)
    assert ready.vouched, "its commit is not published yet"
    ready.admit([version(2)], adopt=None)
    assert ready.vouched
    apply(ready, v.PrepareUpdateRequest(version=version(3)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    assert ready.vouched, "it is being written"
    ready.admit([version(3)], adopt=None)
    assert not ready.vouched, "the others have published without it"


def test_a_stage_that_was_left_out_tells_nothing_while_it_takes_part_in_another_update(ready: Facts) -> None:
    ready.admit([version(2)], adopt=None)
    assert (state(ready), ready.vouched) == ("STALE", False)
    stage_adapter(ready, "1")
    assert (state(ready), ready.vouched) == ("STALE", False)
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    update(ready, 3)
    assert (state(ready), ready.vouched) == ("UPDATING", False), "nor once that is committed"
    ready.admit([version(3)], adopt=None)
    assert (state(ready), ready.vouched) == ("READY", True)


def test_what_comes_of_weights_that_are_written_by_halves_is_not_told_in_the_next_update(ready: Facts) -> None:
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    assert (state(ready), ready.vouched) == ("UPDATING", False)


def test_a_stage_that_sleeps_at_a_version_of_the_past_tells_nothing(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]), released=(MEMORY_TAG_KV_CACHE,))
    assert (state(ready), ready.vouched) == ("ASLEEP", True)
    ready.admit([version(2)], adopt=None)
    assert (state(ready), ready.vouched) == ("ASLEEP", False)


def test_what_was_generated_before_the_weights_were_released_may_be_told(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    for _ in range(2):
        apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]), released=(MEMORY_TAG_WEIGHTS,))
        assert (state(ready), ready.vouched) == ("ASLEEP", True)
    apply(ready, v.ResumeMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]))
    update(ready)
    assert (state(ready), ready.vouched) == ("UPDATING", True)
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), ready.vouched) == ("DIRTY", False)


@pytest.mark.parametrize("outcome", [OUTCOME_APPLIED, OUTCOME_DIRTY, OUTCOME_UNKNOWN])
def test_an_update_that_ends_past_its_first_byte_leaves_the_stage_dirty(ready: Facts, outcome: int) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), outcome, update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"
    assert refused(ready, v.ContinueGenerationRequest()) == "WEIGHTS_DIRTY"


def test_a_committed_update_that_is_aborted_is_not_served(ready: Facts) -> None:
    update(ready)
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"
    ready.admit([version(2)], adopt=None)
    assert state(ready) == "DIRTY", "its weights were not vouched for, whatever the others published"


def test_a_commit_of_unknown_outcome_leaves_the_stage_dirty(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(2)), OUTCOME_UNKNOWN, update_id="u")
    ready.admit([version(2)], adopt=None)
    assert state(ready) == "UPDATING"
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"


def test_only_a_full_update_clears_dirty(ready: Facts) -> None:
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    assert state(ready) == "DIRTY"
    partial = v.PrepareUpdateRequest(version=version(2), kind=v.UPDATE_KIND_PARTIAL)
    assert refused(ready, partial, "u") == "WEIGHTS_DIRTY"
    update(ready)
    ready.admit([version(2)], adopt=None)
    assert state(ready) == "READY"


@pytest.mark.parametrize("kind", [v.UPDATE_KIND_PARTIAL, v.UPDATE_KIND_ADAPTER])
def test_an_update_that_is_prepared_anew_stays_of_its_kind(ready: Facts, kind: int) -> None:
    """Else what a full one has left half-written would be committed as weights that began whole."""
    apply(ready, v.PrepareUpdateRequest(version=version(2), kind=v.UPDATE_KIND_FULL), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), OUTCOME_DIRTY, update_id="u")
    other = v.PrepareUpdateRequest(version=version(2), kind=kind, adapter=v.Adapter(name="a"))
    assert refused(ready, other, "u") == "FIELD_CONFLICT"
    for same in (v.UPDATE_KIND_FULL, v.UPDATE_KIND_UNSPECIFIED):
        apply(ready, v.PrepareUpdateRequest(version=version(2), kind=same), update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"
    assert refused(ready, other, "u") == "WEIGHTS_DIRTY"


def test_a_check_that_finds_other_weights_than_were_confirmed_leaves_the_stage_dirty(ready: Facts) -> None:
    for outcome in (OUTCOME_REJECTED, OUTCOME_UNKNOWN):
        apply(ready, v.CheckWeightsRequest(), outcome)
        assert state(ready) == "READY", "nothing was found out"
    apply(ready, v.CheckWeightsRequest(), OUTCOME_DIRTY)
    assert (state(ready), ready.model_digest) == ("DIRTY", "")


def write_adapter(facts: Facts, label: str, pause: int = common.PAUSE_MODE_UNSPECIFIED) -> None:
    """An adapter update up to its seal."""
    told = v.Adapter(name="math", version=label, load_id=f"by {label}")
    apply(facts, v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER, adapter=told, pause=pause), update_id="u")
    apply(facts, v.LoadAdapterRequest(name="math", path="p", version=label), update_id="u")


def stage_adapter(facts: Facts, label: str) -> None:
    """An adapter update up to its commit."""
    write_adapter(facts, label)
    apply(facts, v.SealUpdateRequest(), update_id="u")


def closed(facts: Facts) -> str:
    return facts.update.closed_adapter if facts.update is not None else ""


@pytest.mark.parametrize(
    ("pause", "while_it_comes"), [(common.PAUSE_MODE_UNSPECIFIED, "math"), (common.PAUSE_MODE_RETRACT, "")]
)
def test_an_adapter_update_leaves_the_stage_as_it_is_and_closes_its_adapter_only(
    ready: Facts, pause: int, while_it_comes: str
) -> None:
    write_adapter(ready, "a-1", pause)
    assert (state(ready), closed(ready)) == ("READY", while_it_comes)
    apply(ready, v.SealUpdateRequest(), update_id="u")
    assert (state(ready), closed(ready)) == ("READY", "math")
    for late in (v.LoadAdapterRequest(name="math", path="p"), v.UpdateWeightsFromTensorRequest()):
        assert refused(ready, late, "u") == "ILLEGAL_STATE", "what was verified is what is committed"
    apply(ready, v.PauseGenerationRequest())
    assert state(ready) == "PAUSED", "a pause of the whole stage is one beside it"
    apply(ready, v.CommitUpdateRequest(), update_id="u")
    assert (state(ready), closed(ready)) == ("PAUSED", "")


def test_an_adapter_that_is_not_sealed_is_not_committed(ready: Facts) -> None:
    write_adapter(ready, "a-1", common.PAUSE_MODE_RETRACT)
    assert refused(ready, v.CommitUpdateRequest(), "u") == "ILLEGAL_STATE"
    apply(ready, v.SealUpdateRequest(), OUTCOME_UNKNOWN, update_id="u")
    assert refused(ready, v.CommitUpdateRequest(), "u") == "ILLEGAL_STATE", "a rank may still generate with the old one"
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), closed(ready)) == ("READY", "")


@pytest.mark.parametrize("asleep", [False, True])
def test_what_an_adapter_update_has_staged_is_checked_in_any_state(ready: Facts, asleep: bool) -> None:
    if asleep:
        apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]), released=(MEMORY_TAG_KV_CACHE,))
    write_adapter(ready, "a-1")
    assert state(ready) == ("ASLEEP" if asleep else "READY")
    apply(ready, v.CheckWeightsRequest(adapter="math"), update_id="u")
    assert refused(ready, v.CheckWeightsRequest(shadow=True), "u") == "UPDATE_NOT_FOUND", "there is no shadow copy"
    apply(ready, v.SealUpdateRequest(), update_id="u")
    apply(ready, v.CommitUpdateRequest(), update_id="u")
    assert set(ready.adapters) == {"math"}


@pytest.mark.parametrize("outcome", [OUTCOME_DIRTY, OUTCOME_UNKNOWN])
def test_an_adapter_is_served_at_the_version_that_is_admitted(ready: Facts, outcome: int) -> None:
    stage_adapter(ready, "a-1")
    apply(ready, v.CommitUpdateRequest(), update_id="u")
    assert (state(ready), ready.version) == ("READY", version(1)), "the weights are what they were"
    assert ready.servable_adapters == {}
    ready.admit([version(1)], None, [v.Adapter(name="math", version="a-1")])
    assert ready.servable_adapters == {"math": "a-1"}
    ready.admit([version(1)], None, [v.Adapter(name="math", version="a-1", load_id="by another update")])
    assert ready.servable_adapters == {}, "a label may come twice"
    ready.admit([version(1)], None, [v.Adapter(name="math", version="a-1", load_id="by a-1")])
    write_adapter(ready, "a-2")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), outcome, update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), ready.servable_adapters) == ("READY", {"math": "a-1"}), "it was staged beside"
    stage_adapter(ready, "a-2")
    apply(ready, v.CommitUpdateRequest(), outcome, update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert (state(ready), ready.servable_adapters) == ("READY", {}), "ranks may disagree about it"


def test_a_base_update_drops_adapters_when_it_says_so(ready: Facts) -> None:
    stage_adapter(ready, "a-1")
    apply(ready, v.CommitUpdateRequest(), update_id="u")
    update(ready, 2)
    ready.admit([version(2)], None)
    assert list(ready.adapters) == ["math"]
    apply(ready, v.PrepareUpdateRequest(version=version(3)), update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(3), adapters=v.ADAPTER_POLICY_DROP), update_id="u")
    assert not ready.adapters


@pytest.mark.parametrize("outcome", [OUTCOME_UNKNOWN, OUTCOME_DIRTY])
def test_adapters_that_some_ranks_may_have_dropped_are_held_by_none(ready: Facts, outcome: int) -> None:
    stage_adapter(ready, "a-1")
    apply(ready, v.CommitUpdateRequest(), update_id="u")
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    dropping = v.CommitUpdateRequest(version=version(2), adapters=v.ADAPTER_POLICY_DROP)
    apply(ready, dropping, OUTCOME_REJECTED, update_id="u")
    assert list(ready.adapters) == ["math"]
    apply(ready, dropping, outcome, update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"
    update(ready, 3)
    assert not ready.adapters


def test_weights_that_were_released_are_stale_when_resumed(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest())
    apply(ready, v.ReleaseMemoryRequest(), released=(MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS))
    assert state(ready) == "ASLEEP"
    assert refused(ready, v.ContinueGenerationRequest()) == "MEMORY_RELEASED"
    assert refused(ready, v.PrepareUpdateRequest(version=version(2)), "u") == "MEMORY_RELEASED"
    apply(ready, v.ResumeMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]), released=(MEMORY_TAG_KV_CACHE,))
    assert state(ready) == "ASLEEP"
    apply(ready, v.ResumeMemoryRequest())
    assert state(ready) == "STALE"
    assert refused(ready, v.ContinueGenerationRequest()) == "WEIGHTS_STALE"
    ready.admit([version(1)], adopt=version(1))
    assert state(ready) == "STALE", "lost weights cannot be adopted"
    update(ready)
    ready.admit([version(2)], adopt=None)
    assert state(ready) == "PAUSED"


def asleep(facts: Facts, *ranks: bool, outcome: int = OUTCOME_APPLIED, keep: bool = True) -> None:
    """Every region is released, and each rank keeps its weights or does not."""
    request = fenced(v.ReleaseMemoryRequest(keep_weights=keep))
    facts.refuse(of_request(request), request)
    weights = [MEMORY_TAG_WEIGHTS]
    reports = [v.MemoryReport(released=weights, kept=weights * kept) for kept in ranks]
    facts.settle(of_request(request), request, outcome, [RankResult(outcome=outcome, memory=each) for each in reports])


@pytest.mark.parametrize("keep", [True, False])
def test_weights_that_every_rank_keeps_are_what_they_were_after_the_resume(ready: Facts, keep: bool) -> None:
    apply(ready, v.PauseGenerationRequest())
    digest = ready.model_digest = "d"
    for _ in range(2):
        asleep(ready, True, True, keep=keep)
        assert (state(ready), ready.version, ready.vouched) == ("ASLEEP", version(1), True)
    assert refused(ready, v.ContinueGenerationRequest()) == "MEMORY_RELEASED"
    assert refused(ready, v.PrepareUpdateRequest(version=version(2)), "u") == "MEMORY_RELEASED"
    apply(ready, v.ResumeMemoryRequest())
    assert (state(ready), ready.model_digest) == ("PAUSED", digest)
    apply(ready, v.ContinueGenerationRequest())
    assert state(ready) == "READY"


def test_weights_that_slept_while_another_version_was_published_are_stale(ready: Facts) -> None:
    asleep(ready, True)
    ready.admit([version(2)], adopt=None)
    apply(ready, v.ResumeMemoryRequest())
    assert (state(ready), ready.version) == ("STALE", version(1))


def test_weights_that_a_rank_does_not_keep_or_may_not_have_kept_are_lost(ready: Facts) -> None:
    asleep(ready, True, False)
    assert ready.weights is Weights.LOST


def test_weights_are_lost_where_it_is_unknown_whether_they_were_kept(ready: Facts) -> None:
    asleep(ready, True, True, outcome=OUTCOME_UNKNOWN)
    assert ready.weights is Weights.LOST
    assert refused(ready, v.ReleaseMemoryRequest(keep_weights=True)) == "MEMORY_RELEASED", "there is nothing to keep"
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE], keep_weights=True), released=(MEMORY_TAG_WEIGHTS,))


def test_a_mixture_that_was_kept_stays_one(ready: Facts) -> None:
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    asleep(ready, True)
    apply(ready, v.ResumeMemoryRequest())
    assert state(ready) == "DIRTY"


def test_an_admission_closes_no_update_that_has_not_been_committed(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    ready.admit([version(1)], adopt=None)
    assert state(ready) == "UPDATING"


def test_a_version_is_adopted_for_whole_weights_only_and_outside_of_updates(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    ready.admit([version(3)], adopt=version(3))
    assert ready.version == version(1)
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    ready.admit([version(3)], adopt=version(3))
    assert (state(ready), ready.version) == ("DIRTY", WeightVersion())


def test_an_adopted_version_brings_its_keyed_digest_to_whole_weights_only(ready: Facts) -> None:
    sha256, keyed = "a" * 64, f"{'b' * 64}@{'0' * 32}"
    ready.model_digest = sha256
    ready.admit([version(3)], adopt=None, adopt_digest=keyed)
    assert (ready.version, ready.model_digest) == (version(1), sha256)
    for _ in range(2):  # grants are repeated
        ready.admit([version(3)], adopt=version(3), adopt_digest=keyed)
        assert (ready.version, ready.model_digest, ready.sha256_digest) == (version(3), keyed, sha256)
    ready.admit([version(3)], adopt=version(3))
    assert (ready.model_digest, ready.sha256_digest) == (keyed, sha256)
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    ready.admit([version(3)], adopt=version(3), adopt_digest=keyed)
    assert (ready.version, ready.model_digest) == (WeightVersion(), "")


def digested(facts: Facts, *digests: str, **fields: object) -> None:
    """A check that finds these model digests, one for each rank."""
    request = fenced(v.CheckWeightsRequest(**fields))
    results = [RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest=found)) for found in digests]
    facts.settle(of_request(request), request, OUTCOME_APPLIED, results)


def test_a_digest_is_that_of_the_weights_where_all_ranks_agree_about_whole_ones(ready: Facts) -> None:
    digested(ready, "a", "a", "")  # a rank that was not asked for it says none
    assert ready.model_digest == "a"
    for other in (v.CheckWeightsRequest(skip_tensors=["x"]), v.CheckWeightsRequest(adapter="math")):
        digested(ready, "c", **{field.name: value for field, value in other.ListFields()})
        assert ready.model_digest == "a", "it is not of all of the base weights"
    digested(ready, "a", "b")
    assert ready.model_digest == "a", "nobody knows which it is"
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    digested(ready, "c")
    assert ready.model_digest == "", "it is of no version"


def contradiction(facts: Facts, *digests: str, **fields: object) -> RlctlError | None:
    results = [RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest=found)) for found in digests]
    return facts.contradiction(v.CheckWeightsRequest(**fields), results)


def test_whole_weights_that_digest_to_something_else_than_before_contradict_it(ready: Facts) -> None:
    assert contradiction(ready, "b") is None, "nobody had digested them"
    digested(ready, "a", "a")
    assert contradiction(ready, "a", "a", "") is None
    assert contradiction(ready, "b", "b").outcome == OUTCOME_DIRTY
    assert contradiction(ready, "a", "b").outcome == OUTCOME_DIRTY, "ranks are torn"
    assert contradiction(ready, "") is None
    for fields in ({"skip_tensors": ["x"]}, {"adapter": "math"}, {"shadow": True}):
        assert contradiction(ready, "b", **fields) is None, "of something else"
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    assert contradiction(ready, "b") is None, "half-written"


def test_ranks_that_hold_different_replicas_contradict_whole_weights_whatever_they_digest_to(ready: Facts) -> None:
    results = [
        RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest="a", inconsistent=torn))
        for torn in ([], ["norm", "bias"])
    ]
    digested(ready, "a", "a")
    for request in (v.CheckWeightsRequest(), v.CheckWeightsRequest(skip_tensors=["x"])):
        error = ready.contradiction(request, results)
        assert error is not None
        assert (error.outcome, error.metadata) == (OUTCOME_DIRTY, {"tensors": "bias,norm"})
        assert "replicas of bias differ between ranks (2 tensors do)" in error.message
    for request in (v.CheckWeightsRequest(adapter="math"), v.CheckWeightsRequest(shadow=True)):
        assert ready.contradiction(request, results) is None, "of something else"
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    assert ready.contradiction(v.CheckWeightsRequest(), results) is None, "half-written"
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="u")
    assert ready.contradiction(v.CheckWeightsRequest(), results) is None, "whoever verifies it says which rank it was"


def test_weights_that_are_not_the_expected_ones_contradict_what_they_were(ready: Facts) -> None:
    digested(ready, "a")
    for found, contradicts in (("a", False), ("b", True)):
        error = Reason.DIGEST_MISMATCH.error("another", metadata={"found": found}).detail()
        result = RankResult(outcome=OUTCOME_REJECTED, error=error)
        assert (ready.contradiction(v.CheckWeightsRequest(expected_digest="c"), [result]) is not None) == contradicts


def overwritten(facts: Facts, kind: int, *checks: tuple[v.CheckWeightsRequest, int]) -> str:
    """The state after an update with these checks before its commit, and their outcomes."""
    apply(facts, v.PrepareUpdateRequest(version=version(2), kind=kind), update_id="u")
    apply(facts, v.UpdateWeightsFromDistributedRequest(group_name="g"), update_id="u")
    for request, outcome in checks:
        apply(facts, request, outcome)
    apply(facts, v.CommitUpdateRequest(version=version(2)), update_id="u")
    facts.admit([version(2)], adopt=None)
    return state(facts)


def test_an_update_makes_nothing_whole_that_was_found_spoilt_meanwhile(ready: Facts) -> None:
    reset = v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS), OUTCOME_APPLIED
    contradicted = v.CheckWeightsRequest(), OUTCOME_DIRTY
    full, partial = v.UPDATE_KIND_FULL, v.UPDATE_KIND_PARTIAL
    assert overwritten(ready, partial, contradicted) == "DIRTY", "what it has left alone is not what it was"
    assert overwritten(ready, full, contradicted) == "READY", "everything was written"
    assert overwritten(ready, full, reset) == "DIRTY", "what it had written is gone"
    assert overwritten(ready, full) == "READY"


def test_a_digest_that_something_was_written_beside_is_of_no_version(ready: Facts) -> None:
    request = fenced(v.CheckWeightsRequest())
    results = [RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest="a"))]
    ready.settle(of_request(request), request, OUTCOME_APPLIED, results, steady=False)
    assert ready.model_digest == ""
    ready.settle(of_request(request), request, OUTCOME_APPLIED, results)
    assert ready.model_digest == "a"


def test_a_committed_update_without_a_write_is_not_served_either_once_it_is_aborted(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.AbortUpdateRequest(), update_id="u")
    assert state(ready) == "DIRTY"


def test_an_update_does_not_take_a_pause_over_and_who_pauses_by_name_does(ready: Facts) -> None:
    apply(ready, v.PauseGenerationRequest())
    apply(ready, v.PauseGenerationRequest(), update_id="u")
    assert ready.paused_by == ""
    apply(ready, v.ContinueGenerationRequest())
    apply(ready, v.PauseGenerationRequest(), update_id="u")
    assert ready.paused_by == "u"
    apply(ready, v.PauseGenerationRequest())
    assert ready.paused_by == ""


def test_the_cache_alone_is_released_without_loss_of_the_weights(ready: Facts) -> None:
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]), released=(MEMORY_TAG_KV_CACHE,))
    assert (state(ready), ready.version) == ("ASLEEP", version(1))
    apply(ready, v.ResumeMemoryRequest())
    assert state(ready) == "READY"


def test_a_mixture_that_was_released_stays_one(ready: Facts) -> None:
    apply(ready, v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
    apply(ready, v.ReleaseMemoryRequest(), released=(MEMORY_TAG_WEIGHTS,))
    assert refused(ready, v.CheckWeightsRequest()) == "MEMORY_RELEASED", "there is nothing to look at"
    apply(ready, v.ResumeMemoryRequest())
    assert state(ready) == "DIRTY"


def test_a_release_of_unknown_outcome_counts_as_one(ready: Facts) -> None:
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]), OUTCOME_UNKNOWN)
    assert state(ready) == "ASLEEP"
    assert ready.weights is Weights.LOST


@pytest.mark.parametrize("outcome", [OUTCOME_UNKNOWN, OUTCOME_DIRTY])
def test_what_had_been_released_before_still_is_after_a_release_of_which_little_is_known(
    ready: Facts, outcome: int
) -> None:
    weights = (MEMORY_TAG_WEIGHTS,)
    apply(ready, v.ReleaseMemoryRequest(tags=weights), released=weights)
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]), outcome)
    assert ready.released == {MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS}
    for request in (v.PrepareUpdateRequest(version=version(2)), v.CheckWeightsRequest()):
        assert refused(ready, request, "u") == "MEMORY_RELEASED", "an engine has nothing to write into, or to read"


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({}, "/new"),
        ({"load_format": "auto"}, "/new"),
        ({"load_format": "direct"}, ""),
        ({"target_modules": ["lm_head"]}, ""),
    ],
)
def test_the_checkpoint_is_known_only_when_it_is_what_the_weights_are(
    ready: Facts, fields: dict[str, object], known: str
) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDiskRequest(model_path="/new", **fields), update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="u")
    assert ready.checkpoint == known


@pytest.mark.parametrize("outcome", [OUTCOME_APPLIED, OUTCOME_DIRTY, OUTCOME_UNKNOWN])
@pytest.mark.parametrize(
    "write",
    [
        v.UpdateWeightsFromDistributedRequest(group_name="g"),
        v.UpdateWeightsFromTensorRequest(),
        v.UpdateWeightsFromDiskRequest(model_path="/other", target_modules=["lm_head"]),
    ],
)
def test_a_checkpoint_that_was_written_over_in_its_update_is_not_what_the_weights_are(
    ready: Facts, write: Message, outcome: int
) -> None:
    """A coordinator that has lost its journal would heal others from it."""
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    apply(ready, v.UpdateWeightsFromDiskRequest(model_path="/new"), update_id="u")
    apply(ready, write, outcome, update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="u")
    assert ready.checkpoint == ""


def test_a_checkpoint_is_still_known_once_its_copy_is_sealed_or_a_write_was_refused(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2), apply=v.APPLY_MODE_STAGED), update_id="u")
    apply(ready, v.UpdateWeightsFromDiskRequest(model_path="/new"), update_id="u")
    apply(ready, v.UpdateWeightsFromTensorRequest(), OUTCOME_REJECTED, update_id="u")
    apply(ready, v.SealUpdateRequest(), OUTCOME_UNKNOWN, update_id="u")
    assert refused(ready, v.CommitUpdateRequest(), "u") == "ILLEGAL_STATE"
    apply(ready, v.SealUpdateRequest(), update_id="u")
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="u")
    assert ready.checkpoint == "/new"


def test_only_the_open_update_may_write(ready: Facts) -> None:
    write = v.UpdateWeightsFromDistributedRequest(group_name="g")
    assert refused(ready, write, "u") == "ILLEGAL_STATE"
    assert refused(ready, v.UpdateWeightsFromDistributedRequest(group_name="g")) == "FIELD_REQUIRED"
    apply(ready, v.PrepareUpdateRequest(version=version(2)), update_id="u")
    assert refused(ready, write, "other") == "UPDATE_FENCED"
    assert refused(ready, v.PrepareUpdateRequest(version=version(2)), "other") == "UPDATE_FENCED"


def test_a_mutating_verb_needs_the_epoch_that_is_held(ready: Facts) -> None:
    request = v.PauseGenerationRequest()
    for epoch, reason in ((EPOCH - 1, "EPOCH_FENCED"), (EPOCH + 1, "EPOCH_FENCED"), (0, "EPOCH_REQUIRED")):
        request.header.fence.fleet_epoch = epoch
        with pytest.raises(RlctlError) as caught:
            ready.refuse(of_request(request), request)
        assert caught.value.reason.name == reason
    read = v.GetModelInfoRequest()
    ready.refuse(of_request(read), read)
    checksum = v.CheckWeightsRequest()
    ready.refuse(of_request(checksum), checksum)


def test_a_version_is_compared_by_sequence_and_label(ready: Facts) -> None:
    ready.admit([WeightVersion(label="another", sequence=1)], adopt=None)
    assert state(ready) == "STALE"


def stage_update(facts: Facts, *, sealed: bool = True) -> None:
    apply(facts, v.PrepareUpdateRequest(version=version(2), apply=v.APPLY_MODE_STAGED), update_id="s")
    apply(facts, v.UpdateWeightsFromDiskRequest(model_path="/new"), update_id="s")
    if sealed:
        apply(facts, v.SealUpdateRequest(), update_id="s")


def test_a_staged_update_leaves_the_state_alone_until_the_swap(ready: Facts) -> None:
    stage_update(ready)
    assert (state(ready), ready.version, ready.checkpoint) == ("READY", version(1), "")
    apply(ready, v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    apply(ready, v.ContinueGenerationRequest())
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="s")
    assert (state(ready), ready.version, ready.checkpoint) == ("UPDATING", version(2), "/new")
    ready.admit([version(1), version(2)], adopt=None)
    assert state(ready) == "READY"


@pytest.mark.parametrize("outcome", [OUTCOME_UNKNOWN, OUTCOME_REJECTED, OUTCOME_APPLIED])
def test_whatever_becomes_of_a_staged_write_an_abort_restores_the_stage(ready: Facts, outcome: int) -> None:
    stage_update(ready, sealed=False)
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), outcome, update_id="s")
    apply(ready, v.SealUpdateRequest(), outcome, update_id="s")
    assert state(ready) == "READY"
    apply(ready, v.AbortUpdateRequest(), update_id="s")
    assert (state(ready), ready.version, ready.update) == ("READY", version(1), None)


@pytest.mark.parametrize("outcome", [OUTCOME_DIRTY, OUTCOME_UNKNOWN])
def test_a_swap_that_may_have_gone_wrong_serves_nothing(ready: Facts, outcome: int) -> None:
    stage_update(ready)
    apply(ready, v.CommitUpdateRequest(version=version(2)), outcome, update_id="s")
    assert state(ready) == "UPDATING"
    apply(ready, v.AbortUpdateRequest(), update_id="s")
    assert state(ready) == "DIRTY"


def test_an_engine_that_calls_a_staged_write_dirty_is_believed(ready: Facts) -> None:
    stage_update(ready, sealed=False)
    apply(ready, v.UpdateWeightsFromDistributedRequest(group_name="g"), OUTCOME_DIRTY, update_id="s")
    assert state(ready) == "UPDATING"


def test_a_staged_update_is_written_sealed_and_committed_in_this_order(ready: Facts) -> None:
    for request in (v.SealUpdateRequest(), v.CheckWeightsRequest(shadow=True)):
        assert refused(ready, request, "s") == "UPDATE_NOT_FOUND"
    stage_update(ready, sealed=False)
    assert refused(ready, v.CommitUpdateRequest(), "s") == "ILLEGAL_STATE"
    assert refused(ready, v.PrepareUpdateRequest(version=version(2)), "s") == "FIELD_CONFLICT"
    assert refused(ready, v.CheckWeightsRequest(shadow=True), "other") == "UPDATE_FENCED"
    apply(ready, v.CheckWeightsRequest(shadow=True, action=v.CHECK_ACTION_CHECKSUM), update_id="s")
    apply(ready, v.CheckWeightsRequest())  # of the weights that serve: anybody's
    apply(ready, v.SealUpdateRequest(), update_id="s")
    assert refused(ready, v.UpdateWeightsFromDiskRequest(model_path="/x"), "s") == "ILLEGAL_STATE"
    # Another attempt starts over.
    apply(ready, v.PrepareUpdateRequest(version=version(2), apply=v.APPLY_MODE_STAGED), update_id="s")
    assert refused(ready, v.CommitUpdateRequest(), "s") == "ILLEGAL_STATE"


def test_the_digest_of_a_shadow_copy_is_the_weights_once_they_are_swapped(ready: Facts) -> None:
    stage_update(ready)
    ready.model_digest = "old"
    check = fenced(v.CheckWeightsRequest(shadow=True), "s")
    results = [RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest="new"))]
    ready.settle(of_request(check), check, OUTCOME_APPLIED, results)
    assert ready.model_digest == "old"
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="s")
    assert ready.model_digest == "new"


def test_the_digest_of_a_copy_that_is_still_written_is_nobodys(ready: Facts) -> None:
    apply(ready, v.PrepareUpdateRequest(version=version(2), apply=v.APPLY_MODE_STAGED), update_id="s")
    check = fenced(v.CheckWeightsRequest(shadow=True), "s")
    results = [RankResult(outcome=OUTCOME_APPLIED, check=v.CheckReport(model_digest="half"))]
    ready.settle(of_request(check), check, OUTCOME_APPLIED, results)
    apply(ready, v.SealUpdateRequest(), update_id="s")
    apply(ready, v.CommitUpdateRequest(version=version(2)), update_id="s")
    assert ready.model_digest == ""


@pytest.mark.parametrize(
    ("tags", "outcome", "doubted"),
    [
        ([MEMORY_TAG_KV_CACHE], OUTCOME_DIRTY, True),
        ([], OUTCOME_UNKNOWN, True),
        ([MEMORY_TAG_KV_CACHE], OUTCOME_APPLIED, False),
        ([MEMORY_TAG_KV_CACHE], OUTCOME_REJECTED, False),
        ([MEMORY_TAG_WEIGHTS], OUTCOME_UNKNOWN, False),
    ],
)
def test_a_cache_whose_release_failed_half_way_is_in_doubt_until_it_is_empty(
    ready: Facts, tags: list[int], outcome: int, doubted: bool
) -> None:
    kv = (MEMORY_TAG_KV_CACHE,)
    for ends, released in (
        (v.FlushCacheRequest(), ()),
        (v.ReleaseMemoryRequest(tags=kv), kv),
        (v.ResumeMemoryRequest(tags=kv), ()),
    ):
        apply(ready, v.ReleaseMemoryRequest(tags=tags), outcome)
        assert ready.cache_in_doubt == doubted
        apply(ready, v.FlushCacheRequest(), OUTCOME_REJECTED)
        apply(ready, v.ResumeMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]), released=kv)
        assert ready.cache_in_doubt == doubted
        apply(ready, ends, released=released)
        assert not ready.cache_in_doubt
        apply(ready, v.ResumeMemoryRequest())


def test_only_a_flush_that_ends_a_doubt_makes_a_stage_build_its_report(ready: Facts) -> None:
    assert not apply(ready, v.FlushCacheRequest())
    apply(ready, v.ReleaseMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]), OUTCOME_UNKNOWN)
    apply(ready, v.ResumeMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]), released=(MEMORY_TAG_KV_CACHE,))
    assert apply(ready, v.FlushCacheRequest())
    assert not apply(ready, v.FlushCacheRequest())


class AnyOrder(RuleBasedStateMachine):
    """Verbs with any outcome in any order: what is READY is whole, at an admitted version, resident and not paused."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = Facts(joined=True, fleet_epoch=EPOCH)
        self.sequence = 1
        self.whole_at: int | None = None  # the version that every byte of the weights belongs to
        self.facts.admit([version(1)], adopt=version(1))
        self.whole_at = 1

    outcomes = st.sampled_from([OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_DIRTY, OUTCOME_UNKNOWN])

    def _try(self, request: Message, outcome: int, **more: object) -> bool:
        try:
            apply(self.facts, request, outcome, **more)
        except RlctlError:
            return False
        return True

    @rule(outcome=outcomes, mode=st.sampled_from([1, 2, 3, 4]))
    def pause(self, outcome: int, mode: int) -> None:
        self._try(v.PauseGenerationRequest(mode=mode), outcome)

    @rule(outcome=outcomes)
    def go_on(self, outcome: int) -> None:
        self._try(v.ContinueGenerationRequest(), outcome)

    @rule(outcome=outcomes)
    def release(self, outcome: int) -> None:
        tags = (MEMORY_TAG_KV_CACHE, MEMORY_TAG_WEIGHTS)
        if self._try(v.ReleaseMemoryRequest(tags=tags), outcome, released=tags) and outcome != OUTCOME_REJECTED:
            self.whole_at = None

    @rule()
    def resume(self) -> None:
        self._try(v.ResumeMemoryRequest(), OUTCOME_APPLIED)

    @rule(outcome=outcomes, mode=st.sampled_from([v.APPLY_MODE_IN_PLACE, v.APPLY_MODE_STAGED]))
    def prepare(self, outcome: int, mode: int) -> None:
        self._try(v.PrepareUpdateRequest(version=version(self.sequence + 1), apply=mode), outcome, update_id="u")

    @rule(outcome=outcomes)
    def write(self, outcome: int) -> None:
        request = v.UpdateWeightsFromDistributedRequest(group_name="g")
        aside = self.facts.update is not None and self.facts.update.staged
        harmless = (OUTCOME_REJECTED, OUTCOME_APPLIED, OUTCOME_UNKNOWN) if aside else (OUTCOME_REJECTED,)
        if self._try(request, outcome, update_id="u") and outcome not in harmless:
            self.whole_at = None

    @rule(outcome=outcomes)
    def seal(self, outcome: int) -> None:
        self._try(v.SealUpdateRequest(), outcome, update_id="u")

    @rule(outcome=outcomes)
    def commit(self, outcome: int) -> None:
        request = v.CommitUpdateRequest(version=version(self.sequence + 1))
        if self._try(request, outcome, update_id="u") and outcome != OUTCOME_REJECTED:
            self.whole_at = self.sequence + 1 if outcome == OUTCOME_APPLIED else None

    @rule(outcome=outcomes)
    def abort(self, outcome: int) -> None:
        open_before = self.facts.update is not None and self.facts.update.committed
        if self._try(v.AbortUpdateRequest(), outcome, update_id="u") and outcome != OUTCOME_REJECTED and open_before:
            self.whole_at = None

    @rule(outcome=outcomes)
    def scramble(self, outcome: int) -> None:
        request = v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS)
        if self._try(request, outcome) and outcome != OUTCOME_REJECTED:
            self.whole_at = None

    @rule()
    def publish(self) -> None:
        self.sequence += 1
        self.facts.admit([version(self.sequence)], adopt=None)

    @invariant()
    def what_is_ready_is_whole_and_admitted(self) -> None:
        if self.facts.state == common.STAGE_STATE_READY:
            assert self.whole_at == self.facts.version.sequence == self.sequence
            assert not self.facts.paused
            assert not self.facts.released


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_refused_continue_of_an_adapter_is_called_by_its_name() -> None:
    request = fenced(v.ContinueGenerationRequest(adapter="math"), "")
    with pytest.raises(RlctlError) as caught:
        Facts(fleet_epoch=request.header.fence.fleet_epoch).refuse(of_request(request), request)
    assert caught.value.reason.name == "ILLEGAL_STATE"
    assert caught.value.message.startswith("ContinueGeneration is for stages that are ")
