"""A prompt computed by one engine and continued by another: the KV entries go from rank to rank, whatever the cuts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
import rlctl_torch.disaggregation.bootstrap
import rlctl_torch.disaggregation.kv_handover
import rlctl_torch.requests.prefill_decode
from rlctl_torch.generation.scheduler import Scheduler
from torch_models import greedy, prompt_of, reference_logprobs
from torch_stage import Stage, generate_request, merge, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import common_pb2, verbs_pb2
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FINISH_TYPE_LENGTH,
    GenerateRequest,
    GenerateResponse,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
_rooms = itertools.count(1)


class Pair:
    """A prefill and a decode engine, and requests that both of them get."""

    def __init__(self, prefill: Stage, decode: Stage) -> None:
        self.prefill = prefill
        self.decode = decode

    def request(self, prompt: Any, **fields: Any) -> GenerateRequest:
        assert self.prefill.info.bootstrap is not None
        host, port = self.prefill.info.bootstrap
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 6}
        place = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": next(_rooms), "model": "actor"}
        return generate_request(prompt, **{**sampling, **place, **fields})

    async def ask(self, prompt: Any, **fields: Any) -> tuple[GenerateResponse, GenerateResponse]:
        """What each of them answers."""
        halves, _ = self.start(prompt, **fields)
        try:
            return tuple(await asyncio.gather(*halves))  # type: ignore[return-value]
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)

    def start(self, prompt: Any, **fields: Any) -> tuple[list[asyncio.Task[GenerateResponse]], GenerateRequest]:
        """Both halves under way, and the request."""
        request = self.request(prompt, **fields)
        return [asyncio.create_task(whole(stage, request)) for stage in (self.prefill, self.decode)], request

    def scheduler(self, stage: Stage) -> Scheduler:
        scheduler = stage.engine._rank.scheduler
        assert scheduler is not None
        return scheduler

    async def met(self) -> None:
        """The decode engine has asked for a prompt that is not computed yet."""
        rooms = self.prefill.engine._rooms
        await until(lambda: rooms is not None and any(room.claimed.is_set() for room in rooms._rooms.values()))

    def lent(self) -> int:
        """Prompts whose entries lie in shared memory."""
        return len(self.prefill.engine._rank.handovers._lent)

    async def idle(self) -> None:
        """Nothing is left of any request."""
        schedulers = [self.scheduler(stage) for stage in (self.prefill, self.decode)]
        await until(lambda: not self.lent() and all(s.idle and not s._slots.used for s in schedulers))


async def whole(stage: Stage, request: GenerateRequest) -> GenerateResponse:
    async with aclosing(stage.engine.generate(request)) as messages:
        return merge([message async for message in messages])


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["1-1", "1-2", "2-1"])
async def pair(request: pytest.FixtureRequest, checkpoints) -> AsyncIterator[Pair]:
    sizes = request.param.split("-")
    stages = [
        Stage(
            checkpoints("llama"),
            request.getfixturevalue("follower") if size == "2" else None,
            disaggregation_mode=mode,
            max_total_tokens=400,
        )
        for size, mode in zip(sizes, ("prefill", "decode"), strict=True)
    ]
    for stage in stages:
        await stage.start()
        stage.engine.set_version(WeightVersion(label="one", sequence=1))
    yield Pair(*stages)
    for stage in stages:
        await stage.stop()


async def refused(asking: Any) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await asking
    return caught.value


async def test_a_pair_gives_what_one_engine_gives(pair: Pair) -> None:
    path = pair.decode.config.model_path
    prompts = [prompt_of(length, length) for length in (40, 9, 2, 1, 17)]
    fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    answers = await asyncio.gather(*(pair.ask(prompt, **fields) for prompt in prompts))
    for prompt, (first, second) in zip(prompts, answers, strict=True):
        output = greedy(path, prompt, 6)
        assert list(second.samples[0].output_ids) == output
        rows = reference_logprobs(path, prompt + output)
        for index, entry in enumerate(second.samples[0].output_logprobs):
            assert abs(entry.logprob - float(rows[len(prompt) - 1 + index, output[index]])) < TOLERANCE
        assert [entry.token_id for entry in first.input_logprobs] == prompt
        for index, entry in enumerate(first.input_logprobs[1:]):
            assert abs(entry.logprob - float(rows[index, prompt[index + 1]])) < TOLERANCE
        assert first.samples[0].finish_reason.type == FINISH_TYPE_LENGTH
        assert not first.samples[0].output_ids
        assert not second.input_logprobs
        [span] = second.samples[0].versions
        assert (span.version.sequence, span.start, span.end, span.HasField("kv_version")) == (1, 0, 6, False)
    await pair.idle()


async def test_the_decode_engine_computes_nothing_of_the_prompt_but_its_last_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = pair.scheduler(pair.decode)
    computed: list[int] = []
    form = scheduler._form

    def counted(shares: Any) -> Any:
        computed.extend(count for _, count in shares)
        return form(shares)

    monkeypatch.setattr(scheduler, "_form", counted)
    await pair.ask(prompt_of(50))
    assert computed == [1] * 6


async def test_samples_of_one_prompt_share_what_was_computed(pair: Pair) -> None:
    prompt = prompt_of(23)
    _, answer = await pair.ask(prompt, n=3)
    assert [list(sample.output_ids) for sample in answer.samples] == [
        greedy(pair.decode.config.model_path, prompt, 6)
    ] * 3
    await pair.idle()


async def test_a_prompt_that_is_only_scored_needs_no_handover(pair: Pair) -> None:
    first, second = await pair.ask(prompt_of(12), max_new_tokens=0, logprob_start_len=3)
    assert len(first.input_logprobs) == 9
    assert not second.samples[0].output_ids
    await pair.idle()


async def test_more_prompts_than_places_in_shared_memory_wait_for_one(pair: Pair) -> None:
    prompts = [prompt_of(7, seed) for seed in range(3 * rlctl_torch.disaggregation.kv_handover.MOST)]
    answers = await asyncio.gather(*(pair.ask(prompt, max_new_tokens=2) for prompt in prompts))
    path = pair.decode.config.model_path
    assert [list(second.samples[0].output_ids) for _, second in answers] == [greedy(path, p, 2) for p in prompts]
    pool = pair.prefill.engine._rank.handovers._pool
    assert pool is not None
    assert pool.allocations <= rlctl_torch.disaggregation.kv_handover.MOST
    await pair.idle()


async def test_entries_of_another_version_are_refused(pair: Pair) -> None:
    for other in (2, 0):
        pair.decode.engine.set_version(WeightVersion(sequence=other))
        error = await refused(pair.ask(prompt_of(9)))
        assert error.reason is Reason.STAGE_NOT_SERVING
        assert error.message == f"the prompt's KV entries are of version 1, and {other} is served"
        await pair.idle()
    pair.decode.engine.set_version(WeightVersion(label="renamed", sequence=1))
    await pair.ask(prompt_of(9))


async def test_entries_of_another_prompt_model_or_adapter_are_refused(pair: Pair) -> None:
    for wrong in ({"model": "ref"}, {"prompt": prompt_of(9, 1)}, {"prompt": prompt_of(8)}):
        request = pair.request(prompt_of(9))
        other = pair.request(wrong.pop("prompt", prompt_of(9)), **{"bootstrap_room": request.bootstrap_room, **wrong})
        computing = asyncio.create_task(whole(pair.prefill, request))
        error = await refused(whole(pair.decode, other))
        assert error.reason is Reason.HANDOVER_FAILED
        assert "another prompt" in error.message or "ref" in error.message
        await computing
        await pair.idle()


async def test_what_never_comes_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlctl_torch.disaggregation.bootstrap, "ARRIVAL_S", 0.1)
    monkeypatch.setattr(rlctl_torch.requests.prefill_decode, "ARRIVAL_S", 0.1)
    await pair.ask(prompt_of(5))  # the server runs from the first request on
    for stage, why in ((pair.decode, "or has no such request"), (pair.prefill, "no decode engine has asked")):
        error = await refused(whole(stage, pair.request(prompt_of(9))))
        assert error.reason is Reason.HANDOVER_FAILED
        assert why in error.message
        await pair.idle()
    error = await refused(whole(pair.decode, pair.request(prompt_of(9), bootstrap_port=1)))
    assert "cannot be reached" in error.message


@pytest.mark.parametrize("begun", [b"\x10", (1 << 20).to_bytes(8, "little") + b"part"], ids=["length", "body"])
async def test_an_answer_that_stops_in_the_middle_is_not_waited_for(
    pair: Pair, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlctl_torch.disaggregation.bootstrap, "ARRIVAL_S", 0.5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(begun)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        request = pair.request(prompt_of(9), bootstrap_host="127.0.0.1", bootstrap_port=port)
        error = await refused(asyncio.wait_for(whole(pair.decode, request), 10))
    assert error.reason is Reason.HANDOVER_FAILED
    await pair.idle()


async def test_a_prefill_engine_at_an_impossible_name_is_not_waited_for(pair: Pair) -> None:
    request = pair.request(prompt_of(9), bootstrap_host="a..b", bootstrap_port=1)
    error = await refused(asyncio.wait_for(whole(pair.decode, request), 10))
    assert error.reason is Reason.HANDOVER_FAILED
    await pair.idle()


async def test_a_decode_engine_that_reads_no_answer_frees_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is larger than the buffers of the connection."""
    monkeypatch.setattr(rlctl_torch.disaggregation.bootstrap, "ARRIVAL_S", 0.5)
    rooms = rlctl_torch.disaggregation.bootstrap.Rooms("127.0.0.1")
    async with rooms.open(7, "m", "") as room:
        _, writer = await asyncio.open_connection(*rooms.address, limit=1)
        writer.write((7).to_bytes(8, "little"))
        await asyncio.wait_for(room.claimed.wait(), 5)
        room.close(Reason.HANDOVER_FAILED.error("x", metadata={"large": "x" * (48 << 20)}))
        await asyncio.wait_for(room.departed.wait(), 10)
        writer.transport.abort()
    rooms.close()


async def test_whoever_leaves_ends_the_other_half(pair: Pair) -> None:
    """At every moment: before the prompt is computed, while its entries wait, after they were taken."""
    await pair.prefill(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE))
    (computing, waiting), _ = pair.start(prompt_of(9))
    await pair.met()
    waiting.cancel()
    answer = await computing
    assert answer.samples[0].finish_reason.type == FINISH_TYPE_ABORT
    assert answer.samples[0].finish_reason.message == "the decode engine has left"
    (computing, waiting), _ = pair.start(prompt_of(9))
    await pair.met()
    computing.cancel()
    assert (await refused(waiting)).reason is Reason.HANDOVER_FAILED
    await pair.prefill(verbs_pb2.ContinueGenerationRequest())
    # While they wait in shared memory.
    await pair.decode(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE))
    (computing, waiting), _ = pair.start(prompt_of(9))
    await until(lambda: any(sample.comes for sample in pair.scheduler(pair.decode)._waiting))
    computing.cancel()
    await until(lambda: not pair.lent())
    other = asyncio.create_task(whole(pair.prefill, pair.request(prompt_of(9, 1))))
    await until(lambda: pair.lent() == 1)
    await pair.decode(verbs_pb2.ContinueGenerationRequest())
    error = await refused(waiting)
    assert error.reason is Reason.HANDOVER_FAILED
    assert "was used again" in error.message
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await pair.idle()
    await pair.ask(prompt_of(9))


async def test_a_pause_that_aborts_ends_both_halves(pair: Pair) -> None:
    for stage in (pair.prefill, pair.decode):
        await stage(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE))
    halves, _ = pair.start(prompt_of(9))
    await until(lambda: not any(pair.scheduler(stage).idle for stage in (pair.prefill, pair.decode)))
    for stage in (pair.decode, pair.prefill):
        await stage(verbs_pb2.AbortRequestsRequest(abort_all=True))
    finishes = [(await half).samples[0].finish_reason.type for half in halves]
    assert finishes == [FINISH_TYPE_ABORT] * 2
    for stage in (pair.prefill, pair.decode):
        await stage(verbs_pb2.ContinueGenerationRequest())
    await pair.idle()


async def test_a_sample_that_a_pause_sends_back_is_computed_anew_by_its_decode_engine(pair: Pair) -> None:
    prompt, scheduler = prompt_of(30), pair.scheduler(pair.decode)
    halves, _ = pair.start(prompt, max_new_tokens=60)
    before = scheduler._generated
    await until(lambda: scheduler._generated > before)
    await pair.decode(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_RETRACT))
    await pair.decode(verbs_pb2.ContinueGenerationRequest())
    _, answer = await asyncio.gather(*halves)
    assert list(answer.samples[0].output_ids) == greedy(pair.decode.config.model_path, prompt, 60)
    assert answer.samples[0].retractions == 1
    await pair.idle()


async def test_what_a_request_to_a_pair_must_say(pair: Pair) -> None:
    for stage in (pair.prefill, pair.decode):
        error = await refused(whole(stage, generate_request(prompt_of(4), model="actor")))
        assert (error.reason, error.field) == (Reason.FIELD_REQUIRED, "bootstrap_room")
        for lacking in ("bootstrap_host", "bootstrap_port", "model"):
            request = pair.request(prompt_of(4))
            request.ClearField(lacking)  # type: ignore[arg-type]
            assert (await refused(whole(stage, request))).field == lacking
        error = await refused(whole(stage, pair.request(prompt_of(4), bootstrap_room=1 << 63)))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "bootstrap_room")


async def test_a_room_is_one_requests(pair: Pair) -> None:
    await pair.prefill(verbs_pb2.PauseGenerationRequest(mode=common_pb2.PAUSE_MODE_IN_PLACE))
    halves, request = pair.start(prompt_of(9))
    await pair.met()
    twice = pair.request(prompt_of(9), bootstrap_room=request.bootstrap_room)
    assert (await refused(whole(pair.prefill, twice))).field == "bootstrap_room"
    assert "somebody else" in (await refused(whole(pair.decode, twice))).message
    await pair.prefill(verbs_pb2.ContinueGenerationRequest())
    await asyncio.gather(*halves)
    await pair.idle()


async def test_an_engine_of_another_model_refuses_the_entries(checkpoints, pair: Pair) -> None:
    stage = Stage(checkpoints("wide"), disaggregation_mode="decode")
    await stage.start()
    stage.engine.set_version(WeightVersion(sequence=1))
    try:
        error = await refused(Pair(pair.prefill, stage).ask(prompt_of(9)))
        assert error.reason is Reason.HANDOVER_FAILED
        assert "not this model's" in error.message
    finally:
        await stage.stop()
    await pair.idle()


async def test_an_engine_of_no_pair_takes_no_half_of_a_request(stage1: Stage) -> None:
    request = generate_request(prompt_of(4), bootstrap_room=7, bootstrap_host="h", bootstrap_port=1, model="actor")
    error = await refused(whole(stage1, request))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "bootstrap_room")
