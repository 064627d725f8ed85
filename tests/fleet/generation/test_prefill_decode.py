"""A request at two stages: what of each is told, whose failure it is, and that neither outlives the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout import prefill_decode
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.fleet_pb2 import Stage, StageRegistration, StageReport
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FINISH_TYPE_LENGTH,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
    SamplingParams,
    TokenLogprob,
)
from rlctl.v1.verbs_pb2 import Adapter

LOST = Reason.HANDOVER_FAILED.error("nothing came")
GONE = Reason.UNREACHABLE.error("it is gone")
SOON_S = 0.02
Told = GenerateResponse | RlctlError | asyncio.Event | float


class Half:
    """A stage that says these things, and waits at events, or for so many seconds."""

    def __init__(self, *told: Told) -> None:
        self._told = told
        self.said = 0
        self.closed = asyncio.Event()

    async def parts(self) -> AsyncGenerator[GenerateResponse, None]:
        try:
            for each in self._told:
                if isinstance(each, asyncio.Event):
                    await each.wait()
                elif isinstance(each, float):
                    await asyncio.sleep(each)
                elif isinstance(each, RlctlError):
                    raise each
                else:
                    self.said += 1
                    yield each
        finally:
            self.closed.set()


def tokens(*ids: int, ends: bool = False) -> GenerateResponse:
    finish = FinishReason(type=FINISH_TYPE_LENGTH) if ends else None
    return GenerateResponse(rid="r", samples=[Sample(output_ids=ids, finish_reason=finish)])


SCORED = GenerateResponse(rid="r", input_logprobs=[TokenLogprob(token_id=7, logprob=-1.0)])
COMPUTED = GenerateResponse(
    rid="r", samples=[Sample(output_ids=[5], finish_reason=FinishReason(type=FINISH_TYPE_LENGTH))]
)
ABORTED = GenerateResponse(rid="r", samples=[Sample(finish_reason=FinishReason(type=FINISH_TYPE_ABORT, message="why"))])


class Outcome:
    """What a caller of both gets."""

    def __init__(self) -> None:
        self.parts: list[GenerateResponse] = []
        self.error: RlctlError | None = None
        self.at_prefill = False


async def together(prefill: Half, decode: Half, *, scored: bool = False, n: int = 1) -> Outcome:
    outcome = Outcome()
    request = GenerateRequest(rid="r", sampling_params=SamplingParams(n=n), logprob_start_len=0 if scored else -1)

    def met() -> None:
        outcome.at_prefill = True

    try:
        async for part in prefill_decode.together(request, prefill.parts(), decode.parts(), met):
            outcome.parts.append(part)
    except RlctlError as error:
        outcome.error = error
    for half in (prefill, decode):
        if half.said:
            assert half.closed.is_set(), "a half goes on though nobody listens"
    return outcome


async def test_what_is_generated_is_the_decode_stages_and_the_prompts_scores_are_the_prefill_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_decode, "CAUSE_S", 3600.0)
    outcome = await together(Half(SOON_S, SCORED, COMPUTED), Half(tokens(1, 2), tokens(3, ends=True)), scored=True)
    assert not outcome.at_prefill
    assert [list(part.samples[0].output_ids) for part in outcome.parts] == [[1, 2], [3]]
    assert [[entry.token_id for entry in part.input_logprobs] for part in outcome.parts] == [[7], []]
    without = await together(Half(asyncio.Event()), Half(tokens(1, ends=True)))
    assert [list(part.samples[0].output_ids) for part in without.parts] == [[1]], "nobody waits for the prompt's end"


@pytest.mark.parametrize(
    ("prefill", "decode", "error", "at_prefill"),
    [
        ([GONE], [asyncio.Event()], GONE, True),
        ([asyncio.Event()], [GONE], GONE, False),
        ([COMPUTED], [GONE], GONE, False),
        ([GONE], [LOST], GONE, True),  # the cause, not what follows from it
        ([SOON_S, GONE], [LOST], GONE, True),
        ([COMPUTED], [SOON_S, LOST], LOST, True),
        ([COMPUTED], [LOST], LOST, True),
        ([COMPUTED], [tokens(1), GONE], GONE, False),
    ],
)
async def test_a_failure_is_that_of_the_stage_that_has_failed(
    prefill: Sequence[Told], decode: Sequence[Told], error: RlctlError, at_prefill: bool
) -> None:
    outcome = await together(Half(*prefill), Half(*decode))
    assert outcome.error is not None
    assert (outcome.error.reason, outcome.at_prefill) == (error.reason, at_prefill)


async def test_a_prefill_stage_that_dies_after_it_has_given_everything_disturbs_nobody() -> None:
    outcome = await together(Half(SCORED, GONE), Half(tokens(1), tokens(2, ends=True)))
    assert outcome.error is None
    assert len(outcome.parts) == 2
    for end in (GONE, ABORTED):
        outcome = await together(Half(end), Half(tokens(1, ends=True)))
        assert [list(part.samples[0].output_ids) for part in outcome.parts] == [[1]]
        assert not outcome.at_prefill
    outcome = await together(Half(SOON_S, GONE), Half(tokens(1, ends=True)), scored=True)
    assert outcome.error is GONE, "what was asked for is not there"
    assert outcome.at_prefill
    outcome = await together(Half(SOON_S, ABORTED), Half(tokens(1, ends=True)), scored=True)
    assert [part.samples[0].finish_reason.type for part in outcome.parts] == [FINISH_TYPE_ABORT], "nor is it here"
    assert outcome.at_prefill


async def test_a_decode_stage_that_says_nothing_at_all_is_no_part() -> None:
    for scored in (False, True):
        outcome = await together(Half(COMPUTED), Half(), scored=scored)
        assert (outcome.parts, outcome.error) == ([], None)


async def test_the_cause_is_waited_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_decode, "CAUSE_S", 0.02)
    outcome = await together(Half(asyncio.Event()), Half(LOST))
    assert outcome.error is LOST
    assert outcome.at_prefill


@pytest.mark.parametrize(("decode", "n", "samples"), [([asyncio.Event()], 0, 1), ([LOST], 2, 2)])
async def test_a_prompt_that_is_aborted_cuts_every_sample(decode: Sequence[Told], n: int, samples: int) -> None:
    outcome = await together(Half(ABORTED), Half(*decode), n=n)
    [part] = outcome.parts
    assert [(s.index, s.finish_reason.type, s.finish_reason.message) for s in part.samples] == [
        (index, FINISH_TYPE_ABORT, "why") for index in range(samples)
    ]
    assert outcome.error is None


async def test_who_stops_listening_ends_both() -> None:
    halves = Half(SCORED, asyncio.Event()), Half(tokens(1), asyncio.Event())
    parts = prefill_decode.together(GenerateRequest(rid="r"), halves[0].parts(), halves[1].parts(), lambda: None)
    assert list((await anext(parts)).samples[0].output_ids) == [1]
    await parts.aclose()
    assert all(half.closed.is_set() for half in halves)


def test_both_get_one_request_under_a_room_of_its_own() -> None:
    prefill = Stage(
        registration=StageRegistration(slot="p", bootstrap_host="h", bootstrap_port=9),
        report=StageReport(
            weight_version=WeightVersion(sequence=3),
            adapters=[Adapter(name="math", digest="abc"), Adapter(name="prose", digest="def")],
        ),
    )
    decode = Stage(registration=StageRegistration(slot="d", model="actor"))
    request = GenerateRequest(rid="r", text="x")
    made = [prefill_decode.halves(request, prefill, decode) for _ in range(100)]
    assert {(each.bootstrap_host, each.bootstrap_port, each.model, each.rid) for each in made} == {
        ("h", 9, "actor", "r")
    }
    assert len({each.bootstrap_room for each in made}) == 100
    assert all(each.bootstrap_room < 1 << 63 for each in made)
    assert {(each.bootstrap_version_seq, each.bootstrap_adapter_digest) for each in made} == {(3, "")}
    request.adapter = "prose"
    assert prefill_decode.halves(request, prefill, decode).bootstrap_adapter_digest == "def"
    assert not request.HasField("bootstrap_room")
