"""A trainer's publisher against an in-process fleet, where no tensor has to travel."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from google.protobuf.message import Message
from updating import join, unreachable, write

import rlctl
from rlctl.client.connection import Connection
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.planner import Planner
from rlctl.engine import Call
from rlctl.sdk import aio
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.trainer.bucket_plan import digests_of
from rlctl.trainer.lead import Leading
from rlctl.trainer.member_streams import Lead
from rlctl.trainer.pending_update import AsyncPending
from rlctl.trainer.publisher import AsyncPublisher
from rlctl.v1 import verbs_pb2
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_UNKNOWN,
    Operation,
    OperationState,
)
from rlctl.v1.trainer_pb2 import Sent
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, BeginWeightUpdateResponse, UpdateTarget
from rlctl.v1.verbs_pb2 import TensorDigest
from rlctl.weights.tensor.tensors import TensorMeta


@contextlib.asynccontextmanager
async def publishing(fleet: InProcessFleet) -> AsyncIterator[AsyncPublisher]:
    client = await aio.connect(fleet.server.address)
    publisher = client.publisher("actor")
    yield publisher
    await publisher.close()
    await client.close()


class Source:
    """One tensor; a function is called before it is given."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self._happens = happens

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta("w", torch.float32, (1,))]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._happens()
        yield "w", torch.zeros(1)


async def test_a_sources_own_error_is_raised_as_it_is_and_only_the_deadline_is_called_one(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TimeoutError("the trainer's own gather")

    client = await aio.connect(fleet.server.address)
    publisher = client.publisher("actor")
    with pytest.raises(TimeoutError, match="own gather"):
        await publisher.update(Source(fail), version="never", checkpoint=checkpoint("two"))
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.0)
    release = threading.Event()
    with pytest.raises(RlctlError) as caught:
        await publisher.update(Source(release.wait), version="late", checkpoint=checkpoint("two"), deadline_s=0.3)
    release.set()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    await publisher.close()
    await client.close()


async def test_pairs_that_do_not_come_keep_neither_the_loop_nor_their_trainer(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be gathered by collectives of the trainer's own, in which another of its ranks is missing."""
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.0)
    release = threading.Event()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        release.wait(5)
        yield "w", torch.zeros(1)

    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        updating = asyncio.create_task(publisher.update(pairs(), version="late", deadline_s=0.5))
        started = time.monotonic()
        await client.rollout("actor").generate([0], max_new_tokens=1)
        with pytest.raises(RlctlError) as caught:
            await updating
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 3
        release.set()
        await publisher.update(pairs(), version="two", checkpoint=checkpoint("two"), verify="none")


async def test_pairs_may_be_made_with_the_fleets_help(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    def trainer() -> str:
        with rlctl.connect(fleet.server.address) as client, client.publisher("actor") as publisher:

            def pairs() -> Iterator[tuple[str, torch.Tensor]]:
                assert client.status().models
                yield "w", torch.zeros(1)

            return publisher.update(pairs(), version="two", checkpoint=checkpoint("two"), verify="none").version.label

    assert await asyncio.wait_for(asyncio.to_thread(trainer), 20) == "two"


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_what_would_end_a_loop_is_an_error_of_the_source(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], raised: type[BaseException]
) -> None:
    def end() -> None:
        raise raised("by the source")

    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        with pytest.raises(RlctlError, match="by the source") as caught:
            await publisher.update(Source(end), version="never", checkpoint=checkpoint("two"))
        assert caught.value.reason is Reason.SOURCE_FAILED
        await publisher.update(Source(lambda: None), version="two", checkpoint=checkpoint("two"), verify="none")


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("how", [{}, {"apply": "staged"}, {"partial": True}, {"checkpoint": "two"}], ids=str)
async def test_weights_that_are_not_finite_are_refused_by_name_before_anything_is_paused(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], how: dict[str, Any], gathered: bool
) -> None:
    class Diverged(Source):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "w", torch.tensor([float("nan")])

    settings = how | ({"checkpoint": checkpoint("two")} if "checkpoint" in how else {})
    source = Diverged(lambda: None)
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        weights = source if gathered else list(source.tensors())
        with pytest.raises(RlctlError) as caught:
            await publisher.update(weights, version="diverged", **settings)
        assert (caught.value.reason, caught.value.field) == (Reason.WEIGHTS_NOT_FINITE, "weights")
        assert caught.value.message.endswith("in the dtype of the checkpoint: w")
        steps = {operation.verb for operation in await client.operations()}
        assert not steps & {"InitWeightsUpdateGroup", "UpdateWeightsFromTensor", "UpdateWeightsFromDisk"}
        fleet_now = await client.status()
        assert all(stage.routable and not stage.report.paused for stage in fleet_now.stages)
        assert [model.latest.label for model in fleet_now.models] == ["initial"]
        two = checkpoint("two")
        await publisher.update(source, version="as it is", checkpoint=two, verify="none", finite=False)


async def test_a_deadline_that_is_no_number_or_a_version_that_is_one_begins_nothing(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        with pytest.raises(TypeError):
            await publisher.update(Source(lambda: None), version="never", deadline_s="5")  # type: ignore[arg-type]
        for endless in (float("inf"), float("nan")):
            with pytest.raises(RlctlError) as caught:
                await publisher.update(Source(lambda: None), version="never", deadline_s=endless)
            assert caught.value.reason is Reason.DEADLINE_INVALID
        with pytest.raises(RlctlError, match="version is 7; it must be a text") as caught:
            await publisher.update(Source(lambda: None), version=7)  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "version")
        await publisher.update(Source(lambda: None), version="two", checkpoint=checkpoint("two"), verify="none")


async def test_settings_that_exclude_each_other_are_named(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        for settings in ({"base": "one", "partial": True}, {"checkpoint": checkpoint("two"), "partial": True}):
            with pytest.raises(RlctlError) as caught:
                await publisher.update(Source(lambda: None), version="never", **settings)
            assert caught.value.reason is Reason.FIELD_CONFLICT
            assert "partial" in f"{caught.value.field} {caught.value.message}"


async def test_an_address_is_named_in_one_way(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address) as client:
        for settings, reason in (
            ({"host": "127.0.0.1", "network": "lo"}, Reason.FIELD_CONFLICT),
            ({"network": "203.0.113.0/24"}, Reason.FIELD_INVALID),
        ):
            with pytest.raises(RlctlError) as caught:
                client.publisher("actor", **settings)
            assert (caught.value.reason, caught.value.field) == (reason, "network")


async def test_a_stage_that_a_version_has_not_come_to_is_named(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        make_fleet(a=1, b=2, lease_s=2.0) as fleet,
        await aio.connect(fleet.server.address) as client,
        client.publisher("actor") as publisher,
    ):
        async with unreachable(fleet, "a"):
            result = await publisher.update(
                Source(lambda: None), version="two", checkpoint=checkpoint("two"), verify="none"
            )
        assert result.left_out == {"a": "absent"}
        assert "stage_results" not in repr(result), "a printed result has a line, not a page"
        assert "version two was not sent to a (absent)" in caplog.text
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        caplog.clear()
        result = await publisher.update(
            Source(lambda: None), version="three", checkpoint=checkpoint("three"), verify="none"
        )
        assert (result.left_out, caplog.text.count("was not sent to")) == ({}, 0)


async def test_an_update_from_disk_that_a_quorum_serves_is_a_result(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk":
            raise Reason.CHECKPOINT_NOT_FOUND.error("not on this host", field="model_path")

    fake_engine.FAULTS[fleet.specs[0].model_path, 1] = fail  # only b has a rank 1
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        source = Source(lambda: None)
        result = await publisher.update(source, version="two", checkpoint=checkpoint("two"), verify="none", quorum=1)
        fake_engine.FAULTS.clear()
    assert result.operation.state == OPERATION_STATE_PARTIAL
    assert result.version.label == "two"
    assert set(result.left_out) == {"b"}


async def test_a_trainer_whose_ranks_do_not_all_come_can_still_end_and_meets_once(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[threading.Thread] = []
    come = threading.Event()

    def share(group: object, told: str) -> str:
        """A collective of which the other rank knows nothing yet."""
        del group
        met.append(threading.current_thread())
        come.wait(60)
        return told

    monkeypatch.setattr("rlctl.trainer.publisher.share", share)
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.0)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    async with await aio.connect(fleet.server.address) as client:
        publisher = client.publisher("actor", trainer_group=object())
        for version in ("early", "too"):
            with pytest.raises(RlctlError) as caught:
                await publisher.update(Source(lambda: None), version=version, deadline_s=0.1)
            assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert [thread.daemon for thread in met] == [True], "one meeting, which keeps no interpreter from ending"
        come.set()
        met[0].join(10)
        await publisher.close()


async def test_a_coordinator_that_is_gone_does_not_keep_a_trainer_beyond_its_deadline(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.trainer.lead.LATE_S", 0.1)
    monkeypatch.setattr("rlctl.client.connection.REPLY_S", 0.1)
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.0)
    call = Connection.call

    async def opened(self: Connection, method: str, request: object, timeout_s: float) -> BeginWeightUpdateResponse:
        """The update is opened, and then nobody answers any more."""
        monkeypatch.setattr(Connection, "call", call)
        await fleet.server.stop()
        return BeginWeightUpdateResponse(update_id="lost", lease_ttl=duration(30), targets=[UpdateTarget(slot="a")])

    async with await aio.connect(fleet.server.address) as client:
        publisher = client.publisher("actor")
        monkeypatch.setattr(Connection, "call", opened)
        started = time.monotonic()
        with pytest.raises(RlctlError) as caught:
            await publisher.update(Source(lambda: None), version="never", deadline_s=1.0)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        assert time.monotonic() - started < 20
        await publisher.close()


class Slow:
    """A connection on which the first answer to a method is long on its way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, delay_s: float) -> None:
        self.answered = threading.Event()
        call = Connection.call

        async def slow(connection: Connection, called: str, request: Message, timeout_s: float) -> Message:
            answer: Message = await call(connection, called, request, timeout_s)
            if called == method and not self.answered.is_set():
                self.answered.set()
                await asyncio.sleep(delay_s)
            return answer

        monkeypatch.setattr(Connection, "call", slow)


async def served(client: aio.AsyncFleet) -> list[str]:
    """Labels of the versions that the models serve."""
    return [model.latest.label for model in (await client.status()).models]


async def test_an_update_whose_time_is_up_while_it_is_committed_is_unknown(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.2)
    Slow(monkeypatch, "UpdateWeightsFromDisk", 30)
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        with pytest.raises(RlctlError) as caught:
            await publisher.update(
                Source(lambda: None), version="two", checkpoint=checkpoint("two"), verify="none", deadline_s=1.5
            )
        assert (caught.value.reason, caught.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
        assert await served(client) == ["two"]


async def test_an_update_whose_answer_is_missing_is_what_the_coordinator_says_it_is(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(leading: Leading, source: Source, wire: object, plan: BeginWeightUpdateResponse, *_: object) -> list:
        await join(fleet, plan)
        await write(fleet, plan, "two")
        return [Sent()]

    monkeypatch.setattr(Leading, "_send", send)
    monkeypatch.setattr("rlctl.trainer.publisher.GRACE_S", 0.2)
    Slow(monkeypatch, "CommitWeightUpdate", 30)
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        result = await publisher.update(Source(lambda: None), version="two", verify="none", deadline_s=1.5)
        assert (result.version.label, await served(client)) == ("two", ["two"])


@pytest.mark.parametrize("closed", [False, True])
async def test_an_update_that_is_given_up_before_its_plan_is_here_keeps_nobody_else_out(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, *, closed: bool
) -> None:
    slow = Slow(monkeypatch, "BeginWeightUpdate", 30)
    blocking = await asyncio.to_thread(rlctl.connect, fleet.server.address)
    given_up = await asyncio.to_thread(blocking.publisher, "actor")
    pending = await asyncio.to_thread(lambda: given_up.update_async(Source(lambda: None), version="never"))
    assert await asyncio.to_thread(slow.answered.wait, 10)
    assert [model.update_id for model in fleet.server.coordinator.roster.fleet().models] != [""]
    async with asyncio.timeout(10):
        await asyncio.to_thread(blocking.close if closed else pending.cancel)
        with pytest.raises(RlctlError) as caught:
            await asyncio.to_thread(pending.wait)
    assert (caught.value.reason, caught.value.outcome) == (Reason.CANCELLED, OUTCOME_REJECTED)
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        await publisher.update(Source(lambda: None), version="two", checkpoint=checkpoint("two"), verify="none")
    await asyncio.to_thread(blocking.close)


class Group:
    """The trainer's own group, of two ranks in this process."""

    def __init__(self, rank: int, told: queue.Queue[str]) -> None:
        self.rank = rank
        self.told = told

    def share(self, text: str) -> str:
        if self.rank == 0:
            self.told.put(text)
            return text
        return self.told.get(timeout=30)


@pytest.fixture
def groups() -> list[Group]:
    told: queue.Queue[str] = queue.Queue()
    return [Group(rank, told) for rank in range(2)]


@pytest.fixture
async def two_ranks(
    fleet: InProcessFleet,
    checkpoint: Callable[[str], str],
    groups: list[Group],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[[str], list[AsyncPending]]]:
    """Start an update from a checkpoint at both ranks of a trainer."""
    monkeypatch.setattr("rlctl.trainer.publisher.share", Group.share)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    async with await aio.connect(fleet.server.address) as client:
        ranks = [
            AsyncPublisher(fleet, "actor", trainer_group=group)  # type: ignore[arg-type]
            for fleet, group in zip([client, None], groups, strict=True)
        ]

        def start(version: str) -> list[AsyncPending]:
            source, path = Source(lambda: None), checkpoint(version)
            return [each.update_async(source, version=version, checkpoint=path, verify="none") for each in ranks]

        yield start
        await asyncio.gather(*(each.close() for each in ranks))


@pytest.mark.parametrize(
    "failure", [OPERATION_STATE_UNKNOWN, OPERATION_STATE_FAILED, Reason.LINK_LOST, Reason.UPDATE_IN_PROGRESS]
)
async def test_every_rank_reports_whether_the_version_may_be_served(
    two_ranks: Callable[[str], list[AsyncPending]],
    monkeypatch: pytest.MonkeyPatch,
    failure: Reason | OperationState.ValueType,
) -> None:
    unknown = failure in (OPERATION_STATE_UNKNOWN, Reason.LINK_LOST)
    call = Connection.call

    async def fails(connection: Connection, method: str, request: Message, timeout_s: float) -> Any:
        if method != "UpdateWeightsFromDisk":
            return await call(connection, method, request, timeout_s)
        if isinstance(failure, Reason):
            raise failure.error("no", outcome=OUTCOME_UNKNOWN if unknown else OUTCOME_REJECTED)
        return Operation(state=failure, error=Reason.LINK_LOST.error("restarted").detail())

    monkeypatch.setattr(Connection, "call", fails)
    expected = OUTCOME_UNKNOWN if unknown else OUTCOME_REJECTED
    for pending in two_ranks("two"):
        with pytest.raises(RlctlError) as caught:
            await pending.wait()
        assert caught.value.outcome == expected


@pytest.mark.parametrize("rank", [0, 1])
async def test_an_update_that_is_cancelled_as_soon_as_it_was_started_is_so_at_every_rank(
    two_ranks: Callable[[str], list[AsyncPending]], rank: int
) -> None:
    for pending in two_ranks("two"):
        await pending.wait()
    cancelled = two_ranks("three")
    assert cancelled[rank].cancel()
    async with asyncio.timeout(20):
        for pending in cancelled:
            with pytest.raises(RlctlError) as caught:
                await pending.wait()
            assert caught.value.reason is Reason.CANCELLED
        for pending in two_ranks("four"):
            assert (await pending.wait()).version.label == "four"


@pytest.mark.parametrize("label", ["again", "first"])
async def test_a_rank_that_could_not_join_the_lead_joins_for_the_next_update_without_a_collective(
    two_ranks: Callable[[str], list[AsyncPending]], groups: list[Group], monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    join = Lead.join

    async def unreachable_once(*_: object) -> Lead:
        monkeypatch.setattr(Lead, "join", join)
        raise Reason.UNREACHABLE.error("the lead did not answer")

    monkeypatch.setattr(Lead, "join", unreachable_once)
    lead, member = two_ranks("first")
    with pytest.raises(RlctlError, match="the lead did not answer"):
        await member.wait()
    lead.cancel()
    with pytest.raises(RlctlError):
        await lead.wait()
    async with asyncio.timeout(20):
        for pending in two_ranks(label):
            assert (await pending.wait()).version.label == label
    shared = [await asyncio.to_thread(group.share, "the trainer's own") for group in groups]
    assert shared == ["the trainer's own"] * 2


async def test_a_label_is_repeated_after_both_ranks_failed_to_meet(
    two_ranks: Callable[[str], list[AsyncPending]], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_share = threading.Event()

    def late(group: Group, text: str) -> str:
        may_share.wait(20)
        return group.share(text)

    monkeypatch.setattr("rlctl.trainer.publisher.share", late)
    for pending in two_ranks("first"):
        await asyncio.sleep(0.1)
        pending.cancel()
        with pytest.raises(RlctlError):
            await pending.wait()
    may_share.set()
    async with asyncio.timeout(20):
        for pending in two_ranks("first"):
            assert (await pending.wait()).version.label == "first"


async def test_an_older_coordinator_is_told_of_before_anything_is_sent(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that knows no keys ignores what it is asked for."""
    monkeypatch.setattr(Planner, "_digest_key", lambda *_: b"")
    async with publishing(fleet) as publisher:
        with pytest.raises(RlctlError) as caught:
            await publisher.update([("w", torch.zeros(1))], version="keyed", digest="keyed")
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "digest")
    assert fleet.server.coordinator.roster.models["actor"].record.latest.label == "initial"


async def test_a_checkpoint_is_not_digested_by_a_key(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    async with publishing(fleet) as publisher:
        with pytest.raises(RlctlError) as caught:
            await publisher.update(Source(pytest.fail), version="k", checkpoint=checkpoint("two"), digest="keyed")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_CONFLICT, "digest")


def test_what_is_no_digest_names_no_function() -> None:
    with pytest.raises(RlctlError) as caught:
        rlctl.model_digest([("w", torch.zeros(1))], like="0" * 64 + "@zz")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "like")


@pytest.mark.parametrize(("key", "digits"), [(bytes(16), 64), (b"", 32)])
def test_a_trainer_rank_of_another_release_is_noticed(key: bytes, digits: int) -> None:
    with pytest.raises(RlctlError) as caught:
        digests_of([Sent(digests=[TensorDigest(name="w", sha256="0" * digits)])], key)
    assert caught.value.reason is Reason.SOURCE_FAILED
    assert digests_of([Sent(digests=[TensorDigest(name="w", sha256="0" * (96 - digits))])], key)


async def test_a_coordinator_that_knows_no_decode_check_is_no_success(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older coordinator drops the field, and publishes."""
    monkeypatch.setattr(verification_levels, "decode_check_due", lambda *_: False)
    async with publishing(fleet) as publisher:
        with pytest.raises(RlctlError, match="two is published, but no decode check was made") as caught:
            await publisher.update(
                {"w": torch.zeros(1)}.items(),
                version="two",
                checkpoint=checkpoint("two"),
                verify="none",
                decode_check=True,
            )
    assert (caught.value.reason, caught.value.field) == (Reason.VERIFICATION_UNREACHABLE, "decode_check")


@pytest.mark.parametrize(
    ("settings", "function"),
    [
        ({}, verbs_pb2.DIGEST_FUNCTION_PREFER_KEYED),
        ({"slow": True}, verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED),
        ({"slow": True, "digest": "prefer_keyed"}, verbs_pb2.DIGEST_FUNCTION_PREFER_KEYED),
        ({"digest": "keyed"}, verbs_pb2.DIGEST_FUNCTION_KEYED),
        ({"digest": "sha256"}, verbs_pb2.DIGEST_FUNCTION_SHA256),
        ({"checkpoint": "two"}, verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED),
        (
            {"adapter": "math", "adapter_config": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}},
            verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED,
        ),
    ],
    ids=["default", "without int8", "preferred", "keyed", "sha256", "checkpoint", "adapter"],
)
async def test_a_keyed_digest_is_preferred_for_tensors_of_the_base_weights(
    fleet: InProcessFleet,
    checkpoint: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    function: verbs_pb2.DigestFunction.ValueType,
) -> None:
    functions = []

    def refuse(_: Planner, request: BeginWeightUpdateRequest, model: object) -> bytes:
        functions.append(request.options.digest)
        raise Reason.UNSUPPORTED.error("enough")

    monkeypatch.setattr(Planner, "_digest_key", refuse)
    settings = dict(settings)
    fast = not settings.pop("slow", False)
    monkeypatch.setattr("rlctl.trainer.publisher.outpaces_sha256", lambda: fast)
    if "checkpoint" in settings:
        settings = {"checkpoint": checkpoint("two")}
    async with await aio.connect(fleet.server.address) as client, client.publisher("actor") as publisher:
        with pytest.raises(RlctlError, match="enough"):
            await publisher.update([("w", torch.zeros(1))], version="two", **settings)
    assert functions == [function]
