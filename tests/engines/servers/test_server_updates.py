"""The steps of an update at a server, and its label while its weights are of no version, without a server."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from rlctl_servers.updates.checkpoints import Checkpoints
from rlctl_servers.updates.updates import Updates
from rlctl_servers.updates.version_labels import WRITING

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    WEIGHT_SELECTOR_ALL,
    WEIGHT_SELECTOR_DRAFT,
    WEIGHT_SELECTOR_TARGET,
    Outcome,
    WorkerCoordinates,
)

CALL = Call("c", math.inf, update_id="u")


class Server:
    """A server, its label, and the verbs that its rank carries out.

    Attributes:
        outcome: of the next write that fails; None: writes succeed.
    """

    def __init__(self) -> None:
        self.label = "at its start"
        self.outcome: Outcome.ValueType | None = None
        self.verbs: list[str] = []
        self.requests: list[Any] = []
        self.pauses: list[str] = []

    async def must(self, path: str, body: dict[str, Any], **_: Any) -> None:
        assert path == "/update_weight_version"
        self.label = body["new_version"]

    async def each(self, verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        assert call.update_id
        self.verbs.append(verb)
        self.requests.append(request)
        if self.outcome is not None and verb.startswith("UpdateWeights"):
            raise Reason.GROUP_FAILED.error("it broke", outcome=self.outcome)
        return [reply()]

    async def begin(self, call: Call) -> None:
        assert call.update_id
        self.pauses.append("begin")

    async def end(self, call: Call, cause: RlctlError | None = None) -> None:
        assert call.update_id
        self.pauses.append("end")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def updates(server: Server, tiny: tuple[Any, Path]) -> Updates:
    both: Any = server
    checkpoints = Checkpoints("SGLang", str(tiny[1]), ())
    ranks = [WorkerCoordinates(rank=0)]
    own = ["their.loader"]
    return Updates("SGLang", both, checkpoints, both, ranks, both, label=lambda: "at its start", loaders=own)


async def write(updates: Updates, load_format: str = "") -> None:
    (result,) = await updates.from_distributed(
        v.UpdateWeightsFromDistributedRequest(buckets=[v.TensorBucket()], load_format=load_format), CALL
    )
    assert result.evidence == EVIDENCE_RANK


async def fail_to_write(updates: Updates, server: Server, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> None:
    server.outcome = outcome
    with pytest.raises(RlctlError) as failed:
        await write(updates)
    server.outcome = None
    assert failed.value.outcome == outcome


async def test_an_update_that_wrote_nothing_leaves_the_label_also_after_a_further_attempt(
    updates: Updates, server: Server
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    assert server.label == WRITING
    await updates.prepare(v.PrepareUpdateRequest(), CALL)  # the next attempt, which does not come to write
    await updates.abort(CALL)
    assert server.label == "at its start"
    assert server.pauses == ["begin", "begin", "end"]


@pytest.mark.parametrize("outcome", [OUTCOME_DIRTY, OUTCOME_UNKNOWN])
async def test_a_write_that_may_have_changed_something_leaves_weights_of_no_version(
    updates: Updates, server: Server, outcome: Outcome.ValueType
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server, outcome)
    await updates.abort(CALL)
    assert server.label == WRITING
    assert not updates.whole


async def test_half_written_weights_are_not_called_whole_by_an_update_that_wrote_nothing(
    updates: Updates, server: Server
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await write(updates)
    await updates.abort(CALL)
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    await updates.abort(CALL)
    assert server.label == WRITING


async def test_scrambled_weights_are_not_called_whole_before_the_next_commit(updates: Updates, server: Server) -> None:
    await updates.marking.spoil(CALL)
    assert server.label == WRITING
    for _ in range(2):
        await updates.prepare(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_PARTIAL), CALL)
        await fail_to_write(updates, server)
        await updates.abort(CALL)
        assert server.label == WRITING
    await updates.prepare(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_PARTIAL), CALL)
    await write(updates)
    await updates.commit(v.CommitUpdateRequest(), "new@2", CALL)
    assert server.label == "new@2"
    assert updates.whole


async def test_a_checkpoint_that_took_all_of_the_time_to_read_is_not_loaded(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    late = Call("c", 0.0, update_id="u")
    with pytest.raises(RlctlError) as failed:
        await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), late)
    assert (failed.value.reason, failed.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_REJECTED)
    assert server.verbs == ["PrepareUpdate"]


async def test_the_ranks_load_a_checkpoint_with_the_options_of_the_request(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    options = v.UpdateOptions(recapture_cuda_graph=True)
    request = v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1]), options=options)
    (result,) = await updates.from_disk(request, CALL)  # type: ignore[misc]
    assert result.evidence == EVIDENCE_RANK
    assert result.weights.tensors == len(list(tiny[0].parameters()))
    assert server.requests[-1].options.recapture_cuda_graph
    with pytest.raises(RlctlError) as refused:
        await write(updates)
    assert refused.value.reason is Reason.ILLEGAL_STATE
    await updates.commit(v.CommitUpdateRequest(), "disk@3", CALL)
    assert (server.label, updates.checkpoint) == ("disk@3", str(tiny[1]))
    assert server.verbs[-1] == "AbortUpdate", "the ranks' own update took nothing in"


async def test_buckets_of_sglang_s_flattened_format_are_packed_ones(updates: Updates, server: Server) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await write(updates, "flattened_bucket")
    assert [bucket.format for bucket in server.requests[-1].buckets] == [v.BUCKET_FORMAT_FLATTENED]
    with pytest.raises(RlctlError) as refused:
        await write(updates, "their.loader")
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "load_format")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (v.UpdateWeightsFromTensorRequest(load_format="direct"), "load_format"),
        (v.UpdateWeightsFromTensorRequest(load_format="another.loader"), "load_format"),
        (v.UpdateWeightsFromTensorRequest(engine_payloads=[b"pickle"]), "engine_payloads"),
    ],
)
async def test_tensors_in_memory_of_unknown_forms_are_refused_before_a_rank_hears_of_them(
    updates: Updates, server: Server, request_: v.UpdateWeightsFromTensorRequest, field: str
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    with pytest.raises(RlctlError) as refused:
        await updates.from_tensor(request_, CALL)
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, field)
    await updates.from_tensor(v.UpdateWeightsFromTensorRequest(load_format="their.loader"), CALL)
    assert server.verbs == ["PrepareUpdate", "UpdateWeightsFromTensor"]


async def test_tensors_for_other_models_than_the_update_s_are_refused(server: Server, tiny: tuple[Any, Path]) -> None:
    both: Any = server
    checkpoints = Checkpoints("SGLang", str(tiny[1]), ())
    updates = Updates("SGLang", both, checkpoints, both, [WorkerCoordinates(rank=0)], both, draft=True)
    everything, draft = (v.UpdateOptions(selector=each) for each in (WEIGHT_SELECTOR_ALL, WEIGHT_SELECTOR_DRAFT))
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await updates.from_tensor(v.UpdateWeightsFromTensorRequest(options=everything), CALL)
    with pytest.raises(RlctlError) as refused:
        await updates.from_tensor(v.UpdateWeightsFromTensorRequest(options=draft), CALL)
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_CONFLICT, "options.selector")
    await updates.abort(CALL)
    await updates.prepare(v.PrepareUpdateRequest(selector=WEIGHT_SELECTOR_DRAFT), CALL)
    with pytest.raises(RlctlError) as refused:
        await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), CALL)
    assert refused.value.reason is Reason.UNSUPPORTED


async def test_a_selector_says_nothing_where_there_is_one_model(updates: Updates) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    options = v.UpdateOptions(selector=WEIGHT_SELECTOR_TARGET)
    assert await updates.from_tensor(v.UpdateWeightsFromTensorRequest(options=options), CALL)


async def test_a_pause_that_cannot_be_ended_after_a_commit_is_of_unknown_outcome(
    updates: Updates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(call: Call) -> None:
        raise Reason.UNREACHABLE.error("it is gone")

    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await write(updates)
    monkeypatch.setattr(server, "end", fail)
    with pytest.raises(RlctlError) as failed:
        await updates.commit(v.CommitUpdateRequest(), "new@2", CALL)
    assert failed.value.outcome == OUTCOME_UNKNOWN
    assert (server.label, updates.open) == ("new@2", False)


async def test_a_refused_write_leaves_the_choice_between_tensors_and_a_checkpoint(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    assert await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), CALL)


STAGED = v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED)


async def test_a_staged_update_pauses_and_labels_the_server_for_its_commit_only(
    updates: Updates, server: Server
) -> None:
    await updates.prepare(STAGED, CALL)
    await write(updates)
    await updates.seal(v.SealUpdateRequest(), CALL)
    assert (server.pauses, server.label, updates.whole) == ([], "at its start", True)
    assert (updates.open, updates.in_place) == (True, False)
    await updates.commit(v.CommitUpdateRequest(), "new@2", CALL)
    assert (server.pauses, server.label, updates.whole) == (["begin", "end"], "new@2", True)
    assert server.verbs == ["PrepareUpdate", "UpdateWeightsFromDistributed", "SealUpdate", "CommitUpdate"]


@pytest.mark.parametrize("outcome", [OUTCOME_REJECTED, OUTCOME_DIRTY])
async def test_a_staged_update_that_fails_or_is_aborted_leaves_whole_weights(
    updates: Updates, server: Server, outcome: Outcome.ValueType
) -> None:
    """Also where the other ranks have taken the tensors in."""
    await updates.prepare(STAGED, CALL)
    await write(updates)
    server.outcome = outcome
    with pytest.raises(RlctlError) as failed:
        await write(updates)
    assert failed.value.outcome == OUTCOME_REJECTED
    await updates.abort(CALL)
    assert (server.label, updates.whole, server.verbs[-1]) == ("at its start", True, "AbortUpdate")


@pytest.mark.parametrize("outcome", [OUTCOME_REJECTED, OUTCOME_DIRTY, OUTCOME_UNKNOWN])
async def test_a_swap_that_may_have_changed_something_leaves_weights_of_no_version(
    updates: Updates, server: Server, outcome: Outcome.ValueType, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updates.prepare(STAGED, CALL)
    await write(updates)
    carry_out = server.each

    async def fail(verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        if verb == "CommitUpdate":
            assert server.label == WRITING, "before the first byte"
            raise Reason.ENGINE_FAILED.error("it broke", outcome=outcome)
        return await carry_out(verb, request, reply, call)

    monkeypatch.setattr(server, "each", fail)
    with pytest.raises(RlctlError) as failed:
        await updates.commit(v.CommitUpdateRequest(), "new@2", CALL)
    assert failed.value.outcome == outcome
    rejected = outcome == OUTCOME_REJECTED
    assert updates.whole == rejected, "a drain would let frozen requests go on with them"
    await updates.abort(CALL)
    assert (updates.whole, server.label) == ((True, "at its start") if rejected else (False, WRITING))


async def test_swapped_weights_that_did_not_get_their_label_are_of_no_version(
    updates: Updates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = server.must

    async def refuse(path: str, body: dict[str, Any], **options: Any) -> None:
        if body["new_version"] == "new@2":
            raise Reason.ENGINE_FAILED.error("no", outcome=options["outcome"])
        await carry_out(path, body)

    await updates.prepare(STAGED, CALL)
    await write(updates)
    monkeypatch.setattr(server, "must", refuse)
    for _ in range(2):  # the ranks have swapped, and refuse a further commit
        with pytest.raises(RlctlError) as failed:
            await updates.commit(v.CommitUpdateRequest(), "new@2", CALL)
        assert failed.value.outcome == OUTCOME_DIRTY
        monkeypatch.setattr(server, "each", _refuse_commits(server.each))
    assert server.pauses == ["begin", "begin"], "the server computes nothing with these weights"
    await updates.abort(CALL)
    assert (updates.whole, server.label) == (False, WRITING)
    await updates.prepare(v.PrepareUpdateRequest(), CALL)
    await fail_to_write(updates, server)
    await updates.abort(CALL)
    assert (updates.whole, server.label) == (False, WRITING), "an update that wrote nothing does not repair them"


def _refuse_commits(carry_out: Any) -> Any:
    async def each(verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        if verb == "CommitUpdate":
            raise Reason.UPDATE_NOT_FOUND.error("update u is not open at this rank")
        result: list[Any] = await carry_out(verb, request, reply, call)
        return result

    return each


async def test_a_checkpoint_of_a_staged_update_is_the_server_s_at_the_commit(
    updates: Updates, server: Server, tiny: tuple[Any, Path]
) -> None:
    await updates.prepare(STAGED, CALL)
    await updates.from_disk(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), CALL)
    assert (updates.checkpoint, server.label) == ("", "at its start")
    await updates.commit(v.CommitUpdateRequest(), "disk@3", CALL)
    assert (updates.checkpoint, server.label, server.verbs[-1]) == (str(tiny[1]), "disk@3", "CommitUpdate")


async def test_what_a_staged_update_receives_is_interrupted(
    updates: Updates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updates.prepare(STAGED, CALL)
    begun, ended = asyncio.Event(), asyncio.Event()
    carry_out = server.each

    async def receive(verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        if verb == "AbortUpdate":
            ended.set()
        if verb.startswith("UpdateWeights"):
            begun.set()
            await ended.wait()
            raise Reason.CANCELLED.error("the update was aborted")
        return await carry_out(verb, request, reply, call)

    monkeypatch.setattr(server, "each", receive)
    writing = asyncio.create_task(write(updates))
    await begun.wait()
    await updates.interrupt(CALL)
    assert await updates.received(1)
    with pytest.raises(RlctlError):
        await writing


async def test_copies_that_the_ranks_may_keep_after_a_failed_prepare_are_dropped_by_the_abort(
    updates: Updates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out, late = server.each, Call("late", 0.0, update_id="u")

    async def expire(verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        if call is late:
            raise Reason.DEADLINE_EXCEEDED.error(f"no time is left for {verb}")
        return await carry_out(verb, request, reply, call)

    monkeypatch.setattr(server, "each", expire)
    with pytest.raises(RlctlError) as failed:
        await updates.prepare(STAGED, late)
    assert (failed.value.reason, failed.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
    assert (updates.open, updates.whole, server.verbs) == (True, True, [])
    await updates.abort(CALL)
    assert (updates.open, updates.whole, server.verbs) == (False, True, ["AbortUpdate"])
    assert (server.pauses, server.label) == (["end"], "at its start")


async def test_a_refused_staged_update_is_not_open(
    updates: Updates, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = server.each

    async def refuse(verb: str, request: Any, reply: Any, call: Call) -> list[Any]:
        answers = await carry_out(verb, request, reply, call)
        if verb == "PrepareUpdate":
            raise Reason.MEMORY_FULL.error("no room for a shadow copy", outcome=OUTCOME_DIRTY)
        return answers

    monkeypatch.setattr(server, "each", refuse)
    with pytest.raises(RlctlError) as failed:
        await updates.prepare(STAGED, CALL)
    assert (failed.value.reason, failed.value.outcome) == (Reason.MEMORY_FULL, OUTCOME_REJECTED)
    assert (updates.open, server.verbs) == (False, ["PrepareUpdate", "AbortUpdate"])


@pytest.mark.parametrize(("ranks", "field"), [(True, "abort_all_requests"), (False, "apply")])
async def test_what_cannot_be_staged_is_refused_by_its_field(
    server: Server, tiny: tuple[Any, Path], ranks: bool, field: str
) -> None:
    both: Any = server
    checkpoints = Checkpoints("SGLang", str(tiny[1]), ())
    updates = Updates("SGLang", both, checkpoints, both if ranks else None, [WorkerCoordinates(rank=0)], both)
    with pytest.raises(RlctlError) as refused:
        await updates.prepare(v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED, abort_all_requests=ranks), CALL)
    assert (refused.value.field, server.verbs, server.pauses) == (field, [], [])
