"""Many requests over one stream: what each meets is its own, what they share is bounded, nobody waits for a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from http_calls import nested
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.stage_stream import KEPT, Answers, Line, _Stream
from rlctl.stage.generation.request_stream import UNSENT, Multiplexed
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import AT_ONCE, BATCH_BYTES, REFUSED_ABOVE_BYTES, bearer, open_channel
from rlctl.transport.server import GRACE_S
from rlctl.transport.status import from_grpc
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

FOREVER = 10**6


@pytest.fixture
async def line(fleet: InProcessFleet) -> AsyncIterator[Line]:
    line = Line(fleet.stages["a"].rollout_address)
    yield line
    await line.close()


def asked(tokens: int = 2, **fields: Any) -> r.GenerateRequest:
    return r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=tokens), **fields)


async def all_of(line: Line, request: r.GenerateRequest, within_s: float = 20.0) -> list[r.GenerateResponse]:
    answers = line.ask(request, asyncio.get_running_loop().time() + within_s, ())
    try:
        return [part async for part in answers]
    finally:
        await answers.aclose()


async def why(line: Line, request: r.GenerateRequest, within_s: float = 20.0) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await all_of(line, request, within_s)
    return caught.value


def streams(fleet: InProcessFleet) -> set[Multiplexed]:
    generation = fleet.stages["a"]._generation
    assert generation is not None
    return generation._many


async def test_they_go_over_one_stream_and_each_has_its_own_answer(fleet: InProcessFleet, line: Line) -> None:
    found = await asyncio.gather(*(all_of(line, asked(tokens)) for tokens in range(1, 40)))
    ids = [[token for part in parts for sample in part.samples for token in sample.output_ids] for parts in found]
    assert ids == [list(range(tokens)) for tokens in range(1, 40)]
    assert all(parts[-1].samples[0].HasField("finish_reason") for parts in found)
    assert {(part.slot, part.incarnation) for parts in found for part in parts} == {("a", 1)}
    assert len(streams(fleet)) == 1


async def test_what_one_is_refused_with_is_its_own(line: Line) -> None:
    wrong = [asked(model="zz"), r.GenerateRequest(), asked(min_version_seq=9), asked(adapter="none")]
    going = asyncio.ensure_future(all_of(line, asked(20)))
    refusals = await asyncio.gather(*(why(line, request) for request in wrong))
    assert [error.reason for error in refusals] == [
        Reason.MODEL_NOT_FOUND,
        Reason.FIELD_REQUIRED,
        Reason.VERSION_TOO_OLD,
        Reason.ADAPTER_NOT_FOUND,
    ]
    assert [error.field for error in refusals] == ["model", "prompt", "min_version_seq", "adapter"]
    assert len(await going) == 21


async def test_a_defect_of_one_is_told_and_the_others_go_on(
    fleet: InProcessFleet, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fleet.stages["a"]._engine
    generate = engine.generate

    async def broken(request: r.GenerateRequest) -> AsyncGenerator[r.GenerateResponse, None]:
        async for part in generate(request):
            yield part
            if request.rid == "broken":
                raise ZeroDivisionError("a defect")

    engine.generate = broken  # type: ignore[method-assign]
    error, whole = await asyncio.gather(why(line, asked(rid="broken")), all_of(line, asked(5)))
    assert (error.reason, error.message) == (Reason.INTERNAL, "ZeroDivisionError: a defect")
    assert len(whole) == 6
    assert "a defect" in caplog.text


async def test_who_leaves_ends_at_the_engine_and_the_others_go_on(fleet: InProcessFleet, line: Line) -> None:
    engine: Any = fleet.stages["a"]._engine
    leaving = line.ask(asked(FOREVER, rid="left"), float("inf"), ())
    await anext(leaving)
    staying = line.ask(asked(FOREVER, rid="stays"), float("inf"), ())
    await anext(staying)
    await leaving.aclose()
    await eventually(lambda: set(engine._running) == {"stays"})
    await anext(staying)
    async with asyncio.timeout(5):
        assert len([part async for part in leaving]) < FOREVER


async def test_what_an_engine_gives_up_without_a_word_is_told(fleet: InProcessFleet, line: Line) -> None:
    async def given_up(_: r.GenerateRequest) -> AsyncGenerator[r.GenerateResponse, None]:
        yield r.GenerateResponse()
        raise asyncio.CancelledError

    fleet.stages["a"]._engine.generate = given_up  # type: ignore[method-assign]
    error = await why(line, asked())
    assert (error.reason, error.message) == (
        Reason.ENGINE_FAILED,
        "the engine dropped the request without a reason",
    )


async def test_who_leaves_more_than_once_does_not_cut_short_how_it_ends_at_the_engine(fleet: InProcessFleet) -> None:
    engine: Any = fleet.stages["a"]._engine
    generate = engine.generate
    going, ended = 0, 0

    async def slow_to_end(request: r.GenerateRequest) -> AsyncGenerator[r.GenerateResponse, None]:
        nonlocal going, ended
        try:
            async for part in generate(request):
                yield part
        finally:
            going += 1
            await asyncio.sleep(0.2)
            ended += 1

    engine.generate = slow_to_end
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        call = RolloutServiceStub(channel).GenerateMany()
        numbers = range(1, 4)
        begin = [r.NumberedRequest(number=number, request=asked(FOREVER)) for number in numbers]
        await call.write(r.GenerateManyRequest(begin=begin))
        await eventually(lambda: len(engine._running) == 3)
        await call.write(r.GenerateManyRequest(leave=[1, 2, 2, 7]))
        await eventually(lambda: going == 2)
        await call.write(r.GenerateManyRequest(leave=[1]))
        call.cancel()  # with 1 and 2 about to end
        await eventually(lambda: ended == 3)
    await eventually(lambda: not streams(fleet))


async def test_callers_with_new_tokens_make_way_for_each_other(fleet: InProcessFleet, line: Line) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    staying = line.ask(asked(FOREVER), deadline, bearer("stays"))
    for number in range(3 * KEPT):
        answers = line.ask(asked(1), deadline, bearer(f"token {number}"))
        assert len([part async for part in answers]) == 2
    assert len(line._streams) <= KEPT + 2
    await eventually(lambda: len(streams(fleet)) <= KEPT + 2)
    await anext(staying)
    await staying.aclose()


async def test_the_time_of_one_is_its_own(fleet: InProcessFleet, line: Line) -> None:
    engine: Any = fleet.stages["a"]._engine
    error = await why(line, asked(FOREVER), within_s=0.2)
    assert error.reason is Reason.DEADLINE_EXCEEDED
    await eventually(lambda: not engine._running)
    assert len(await all_of(line, asked(1))) == 2


async def test_a_stage_that_does_not_answer_is_not_waited_for_beyond_the_deadline(unanswering: str) -> None:
    line = Line(unanswering)
    assert (await why(line, asked(), within_s=0.3)).reason is Reason.DEADLINE_EXCEEDED
    await line.close()


@pytest.fixture
async def unanswering() -> AsyncIterator[str]:
    """Where somebody takes connections and says nothing."""
    writers = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in writers:
        writer.close()


async def test_one_that_is_too_large_is_not_sent(line: Line) -> None:
    going = asyncio.ensure_future(all_of(line, asked(20)))
    error = await why(line, r.GenerateRequest(text="x" * (REFUSED_ABOVE_BYTES + 1)))
    assert (error.reason, error.field) == (Reason.MESSAGE_TOO_LARGE, "GenerateRequest")
    assert len(await going) == 21


async def test_when_the_stream_breaks_all_end_and_the_next_one_opens_another(fleet: InProcessFleet, line: Line) -> None:
    going = [asyncio.ensure_future(why(line, asked(FOREVER))) for _ in range(5)]
    await eventually(lambda: len(fleet.stages["a"]._engine._running) == 5)  # type: ignore[attr-defined]
    (stream,) = line._streams.values()
    stream._call.cancel()
    assert {error.reason for error in await asyncio.gather(*going)} == {Reason.CANCELLED}
    assert len(await all_of(line, asked(1))) == 2
    await eventually(lambda: not fleet.stages["a"]._engine._running)  # type: ignore[attr-defined]
    assert len(streams(fleet)) == 1


async def test_callers_with_other_tokens_share_nothing(make_fleet: Callable) -> None:
    async with make_fleet(a=1, token="right") as fleet:
        line = Line(fleet.stages["a"].rollout_address)
        deadline = asyncio.get_running_loop().time() + 20
        right = line.ask(asked(3), deadline, bearer("right"))
        reason = Reason.UNREACHABLE
        while reason is Reason.UNREACHABLE:  # ended while it was written to
            with pytest.raises(RlctlError) as caught:
                await anext(line.ask(asked(3), deadline, bearer("guessed")))
            reason = caught.value.reason
        assert reason is Reason.TOKEN_INVALID
        assert len([part async for part in right]) == 4
        await line.close()


async def test_a_stage_that_ends_lets_what_runs_end_and_takes_no_more(fleet: InProcessFleet, line: Line) -> None:
    going = asyncio.ensure_future(all_of(line, asked(20)))
    await eventually(lambda: fleet.stages["a"]._engine._running)  # type: ignore[attr-defined]
    generation = fleet.stages["a"]._generation
    assert generation is not None
    fleet.stages["a"]._rollout_loop.call_soon(generation.close)
    refused = await why(line, asked(1))
    assert refused.reason is Reason.STAGE_NOT_SERVING
    assert len(await going) == 21
    await eventually(lambda: not streams(fleet))


async def test_a_stage_does_not_wait_for_callers_that_only_stay_connected(fleet: InProcessFleet, line: Line) -> None:
    await all_of(line, asked(1))
    began = time.monotonic()
    await fleet.stages.pop("a").stop()
    assert time.monotonic() - began < GRACE_S


async def test_numbers_that_do_not_grow_end_the_stream(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        call = RolloutServiceStub(channel).GenerateMany()
        begin = r.NumberedRequest(number=3, request=asked(1))
        await call.write(r.GenerateManyRequest(begin=[begin, begin]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        error = from_grpc(caught.value)
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "begin.number")


async def test_what_cannot_be_read_ends_the_stream_at_once(fleet: InProcessFleet) -> None:
    deep = asked(1)
    deep.engine_fields.update(nested(33))
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        call = RolloutServiceStub(channel).GenerateMany()
        await call.write(r.GenerateManyRequest(begin=[r.NumberedRequest(number=1, request=asked(FOREVER))]))
        await call.read()
        await call.write(r.GenerateManyRequest(begin=[r.NumberedRequest(number=2, request=deep)]))

        async def read_on() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_on(), 5)
        error = from_grpc(caught.value)
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "GenerateManyRequest")
    await eventually(lambda: not fleet.stages["a"]._engine._running)  # type: ignore[attr-defined]


async def test_one_of_which_no_message_can_be_made_is_not_sent(line: Line) -> None:
    going = asyncio.ensure_future(all_of(line, asked(20)))
    deep = asked(1)
    deep.engine_fields.update(nested(40))
    error = await why(line, deep)
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "GenerateRequest")
    assert len(await going) == 21


async def test_the_caller_ends_the_stream_and_what_runs_is_answered(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        call = RolloutServiceStub(channel).GenerateMany()
        await call.write(r.GenerateManyRequest(begin=[r.NumberedRequest(number=1, request=asked(3))]))
        await call.done_writing()
        parts = [part async for message in call for part in message.parts]
        assert [part.number for part in parts] == [1] * 4
        assert [part.ended for part in parts] == [False, False, False, True]


# What the stage holds for a caller that does not read, without a network.


async def test_callers_that_do_not_read_make_their_requests_wait() -> None:
    made = 0

    async def large(request: r.GenerateRequest, _: float | None) -> AsyncGenerator[r.GenerateResponse, None]:
        nonlocal made
        for _ in range(40):
            made += 1
            yield r.GenerateResponse(rid=request.rid, samples=[r.Sample(text="t" * BATCH_BYTES)])

    async def once() -> AsyncIterator[Any]:
        begin = [r.NumberedRequest(number=number, request=r.GenerateRequest()) for number in (1, 2)]
        yield r.GenerateManyRequest(begin=begin)
        await asyncio.Event().wait()

    messages = Multiplexed(large).serve(once())
    await anext(messages)
    for _ in range(50):
        await asyncio.sleep(0)
    assert made <= UNSENT + 4  # and one in the hands of each request
    parts = 0
    while parts < 81:  # 80, two ends, less the one above
        parts += len((await anext(messages)).parts)
    assert made == 80
    await messages.aclose()


async def test_callers_that_do_not_read_are_not_waited_for_beyond_the_deadline_and_begin_nothing_more() -> None:
    count = 100

    async def large(_: r.GenerateRequest, __: float | None) -> AsyncGenerator[r.GenerateResponse, None]:
        end = r.Sample(text="t" * BATCH_BYTES, finish_reason=r.FinishReason())
        yield r.GenerateResponse(samples=[end])

    async def more() -> AsyncIterator[Any]:
        for first in range(1, count, 10):
            yield r.GenerateManyRequest(begin=[begun(number) for number in range(first, first + 10)])
            await asyncio.sleep(0.001)

    def begun(number: int) -> r.NumberedRequest:
        request = r.NumberedRequest(number=number, request=r.GenerateRequest())
        request.timeout.FromMilliseconds(200)
        return request

    together = Multiplexed(large)
    messages = together.serve(more())
    parts = list((await anext(messages)).parts)
    await eventually(lambda: not together._running)
    assert sum(message.ByteSize() for message in together._unsent) < (UNSENT + 3) * BATCH_BYTES
    assert together._last < count
    while len(parts) < count:
        parts += (await anext(messages)).parts
    assert sorted(part.number for part in parts if part.ended) == [*range(1, count + 1)]
    late = [part for part in parts if part.HasField("error")]
    assert late
    assert {Reason[part.error.reason] for part in late} == {Reason.DEADLINE_EXCEEDED}
    assert not any(part.HasField("response") for part in late)
    await messages.aclose()


# Neither side waits until the other has taken in everything, without a network.


async def test_a_stage_answers_the_first_while_it_takes_in_the_rest() -> None:
    async def short(request: r.GenerateRequest, _: float | None) -> AsyncGenerator[r.GenerateResponse, None]:
        yield r.GenerateResponse(rid=request.rid, samples=[r.Sample(text="t")])

    async def once() -> AsyncIterator[Any]:
        numbers = range(1, 4 * AT_ONCE + 1)
        begin = [r.NumberedRequest(number=number, request=r.GenerateRequest()) for number in numbers]
        yield r.GenerateManyRequest(begin=begin)

    messages = [message async for message in Multiplexed(short).serve(once())]
    assert len(messages) > 1
    assert [part.number for message in messages for part in message.parts if part.ended] == [*range(1, 4 * AT_ONCE + 1)]


async def test_a_caller_goes_on_after_the_first_answers_while_it_takes_in_the_rest() -> None:
    class Call:
        """Answers everything of the first message with one."""

        def __init__(self) -> None:
            self.written: list[r.GenerateManyRequest] = []
            self.first = asyncio.Event()
            self.answered = False

        async def write(self, message: r.GenerateManyRequest) -> None:
            self.written.append(message)
            self.first.set()

        async def done_writing(self) -> None:
            pass

        async def read(self) -> Any:
            if self.answered:
                await asyncio.Event().wait()
            await self.first.wait()
            self.answered = True
            numbers = [numbered.number for numbered in self.written[0].begin]
            return r.GenerateManyResponse(parts=[r.NumberedResponse(number=n, ended=True) for n in numbers])

    async def one_after_the_other(answers: Answers) -> None:
        assert [part async for part in answers] == []
        stream.begin(asked(), float("inf"))

    call = Call()
    stream = _Stream(call)
    waiting = [one_after_the_other(stream.begin(asked(), float("inf"))) for _ in range(4 * AT_ONCE)]
    await asyncio.gather(*waiting)
    await eventually(lambda: sum(len(message.begin) for message in call.written) == 8 * AT_ONCE)
    assert len(call.written[0].begin) == 4 * AT_ONCE
    assert len(call.written[1].begin) < 4 * AT_ONCE
    stream.finish()
    await stream.closed()


@pytest.mark.parametrize("broken", ["read", "write"])
async def test_a_callers_own_defect_is_told_to_all_that_wait(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    class Call:
        """Fails at what it is told to."""

        def __init__(self) -> None:
            self.cancelled = False

        async def write(self, _: r.GenerateManyRequest) -> None:
            if broken == "write":
                raise DecodeError("a defect")

        async def read(self) -> Any:
            if broken == "write":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            raise DecodeError("a defect")

        def cancel(self) -> None:
            self.cancelled = True

    call = Call()
    stream = _Stream(call)
    for answers in [stream.begin(asked(), float("inf")) for _ in range(3)]:
        with pytest.raises(RlctlError, match="a defect"):
            async with asyncio.timeout(5):
                await anext(answers)
    assert stream.over
    assert call.cancelled, "so that the stage hears of it"
    assert "a stream of requests has failed" in caplog.text
    await stream.closed()
