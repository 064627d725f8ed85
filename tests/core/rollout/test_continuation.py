"""A sample over several attempts: what is asked for next, and what it comes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.continuation import Progress, begin, derived_seed
from rlctl.rollout.sample import RolloutFailed, RolloutSample
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1.common_pb2 import WeightVersion

PROMPT = [7, 8]


def request(**params: object) -> r.GenerateRequest:
    return r.GenerateRequest(input_ids=r.TokenIds(ids=PROMPT), sampling_params=r.SamplingParams(**params))  # type: ignore[arg-type]


def said(
    *tokens: int, version: int = 1, start: int = 0, slot: str = "a", text: str = "", finish: int = 0
) -> r.GenerateResponse:
    """What a stage says of the attempt under way; ``start``: in that attempt."""
    sample = r.Sample(output_ids=tokens, text=text, completion_tokens=start + len(tokens))
    sample.output_logprobs.extend(r.TokenLogprob(token_id=token, logprob=-token) for token in tokens)
    if tokens:
        sample.versions.add(version=WeightVersion(sequence=version), start=start, end=start + len(tokens))
    if finish:
        sample.finish_reason.type = finish  # type: ignore[assignment]
    return r.GenerateResponse(slot=slot, incarnation=1, samples=[sample])


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.integers(1, 30))
def test_each_attempt_asks_for_what_is_missing_and_nothing_is_lost(attempts: list[list[int]], limit: int) -> None:
    progress = Progress(begin(request(max_new_tokens=limit, min_new_tokens=limit // 2)))
    had: list[int] = []
    for number, tokens in enumerate(attempts, 1):
        asked = progress.attempt(number)
        if len(had) >= limit:
            assert progress.finished
            break
        assert list(asked.input_ids.ids) == PROMPT + had
        assert asked.sampling_params.max_new_tokens == limit - len(had)
        assert asked.sampling_params.min_new_tokens == max(limit // 2 - len(had), 0)
        assert asked.min_version_seq == number
        for start, token in enumerate(tokens[: limit - len(had)]):
            progress.take(said(token, version=number, start=start, slot=f"s{number}"))
        had += tokens[: limit - len(had)]
        progress.take(said(finish=r.FINISH_TYPE_ABORT, start=len(tokens)))
    sample = progress.result(latest=len(attempts))
    assert sample.output_ids == had
    assert sample.logprobs == [-token for token in had]
    assert len(sample.versions) == len(had)
    assert None not in sample.versions
    sequences = [version.sequence for version in sample.versions if version]
    assert sequences == sorted(sequences)
    assert sample.staleness == (len(attempts) - sequences[0] if had else None)
    for part in sample.parts:
        assert part.slot == f"s{sequences[part.start]}"


def test_what_the_engine_never_said_the_version_of_is_not_known() -> None:
    progress = Progress(begin(request()))
    progress.attempt(0)
    progress.take(r.GenerateResponse(slot="a", samples=[r.Sample(output_ids=[1, 2])]))  # and the stage died
    progress.attempt(0)
    progress.take(said(3, version=4, finish=r.FINISH_TYPE_STOP))
    sample = progress.result(latest=4)
    assert sample.finished
    assert [version and version.sequence for version in sample.versions] == [None, None, 4]
    assert sample.staleness is None


def test_what_an_engine_counts_is_counted_over_the_cut() -> None:
    progress = Progress(begin(request(max_new_tokens=9)))
    for tokens, cached, retractions in ([1, 2], 3, 2), ([4], 5, 1):
        progress.attempt(0)
        sample = r.Sample(output_ids=tokens, completion_tokens=len(tokens))
        sample.cached_tokens, sample.retractions = cached, retractions
        progress.take(r.GenerateResponse(samples=[sample]))
    whole = progress.result(latest=1).whole
    assert (whole.completion_tokens, whole.retractions) == (3, 3)
    assert whole.cached_tokens == 3, "of the prompt: the rest was generated"


def test_a_sample_can_be_put_down_and_taken_up_again() -> None:
    progress = Progress(begin(request(max_new_tokens=4), group="g", index=1, session_id="s"))
    progress.attempt(0)
    progress.take(said(1, 2))
    cut = progress.result(latest=1)
    assert (cut.finished, cut.finish) == (False, "abort")
    later = Progress(cut)
    assert list(later.attempt(0).input_ids.ids) == [7, 8, 1, 2]
    later.take(said(3, 4, version=2, slot="b", finish=r.FINISH_TYPE_LENGTH))
    done = later.result(latest=3)
    assert (done.finish, done.output_ids, done.group, done.index, done.session_id) == (
        "length",
        [1, 2, 3, 4],
        "g",
        1,
        "s",
    )
    assert (done.staleness, done.staleness_at(5)) == (2, 4)
    assert [(part.slot, part.start) for part in done.parts] == [("a", 0), ("b", 2)]
    assert cut.output_ids == [1, 2], "what was handed out is not changed"


def test_a_prompt_of_text_goes_on_by_the_tokens_that_the_engine_told() -> None:
    progress = Progress(begin(r.GenerateRequest(text="ab")))
    assert progress.attempt(0).text == "ab"
    told = said(1)
    told.prompt_ids.extend(PROMPT)
    progress.take(told)
    again = progress.attempt(0)
    assert again.WhichOneof("prompt") == "input_ids"
    assert list(again.input_ids.ids) == [*PROMPT, 1]
    silent = Progress(begin(r.GenerateRequest(text="ab")))
    silent.attempt(0)
    silent.take(said(1))
    with pytest.raises(RlctlError) as caught:
        silent.attempt(0)
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_what_would_be_another_sample_is_not_continued(penalty: str) -> None:
    progress = Progress(begin(request(**{penalty: 0.5})))
    progress.attempt(0)
    progress.attempt(0)  # nothing was had
    progress.take(said(1))
    with pytest.raises(RlctlError) as caught:
        progress.attempt(0)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, f"sampling_params.{penalty}")


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 0.5}, {}])
def test_a_sample_with_all_its_tokens_has_ended_though_it_could_not_go_on(sampling: dict[str, float]) -> None:
    params = r.SamplingParams(max_new_tokens=2, **sampling)
    progress = Progress(begin(r.GenerateRequest(text="ab", sampling_params=params)))
    progress.attempt(0)
    progress.take(said(1, 2))
    progress.attempt(0)
    assert progress.result(latest=1).finish == "length"


def test_every_sample_and_every_attempt_draws_on_its_own() -> None:
    seeds = {begin(request(seed=5), prompt=p, index=i).request.sampling_params.seed for p in range(3) for i in range(3)}
    assert len(seeds) == 9
    first = begin(request(seed=5))
    assert first.request.sampling_params.seed == begin(request(seed=5)).request.sampling_params.seed
    progress = Progress(first)
    seeds.add(progress.attempt(0).sampling_params.seed)
    progress.take(said(1))
    seeds.add(progress.attempt(0).sampling_params.seed)
    assert len(seeds) == 10
    assert not begin(request()).request.sampling_params.HasField("seed")
    assert 0 <= derived_seed(2**64 - 1, 1) < 2**63
    drawn = Progress(begin(request()))
    drawn.attempt(0)
    drawn.take(said(1))
    assert not drawn.attempt(0).sampling_params.HasField("seed")


@pytest.mark.parametrize(("trim", "text"), [(True, "so "), (False, "so STOP")])
def test_a_stop_string_that_lies_across_a_cut_ends_the_sample(trim: bool, text: str) -> None:
    progress = Progress(begin(request(stop=["STOP"], no_stop_trim=not trim)))
    progress.attempt(0)
    progress.take(said(1, 2, text="so ST"))
    progress.attempt(0)
    progress.take(said(3, text="O"))
    assert not progress.finished
    last = said(4, start=1, text="P more")
    progress.take(last)
    assert last.samples[0].text == ("" if trim else "P"), "what is told as it comes ends there, too"
    sample = progress.result(latest=1)
    assert (sample.finish, sample.text, sample.output_ids) == ("stop", text, [1, 2, 3, 4])
    assert sample.whole.finish_reason.matched_string == "STOP"


@pytest.mark.parametrize("stops", [["ab", "xab", "abc"], ["abc", "ab", "xab"]])
def test_of_stop_strings_that_lie_across_a_cut_the_first_to_end_counts(stops: list[str]) -> None:
    progress = Progress(begin(request(stop=stops)))
    progress.attempt(0)
    progress.take(said(1, text="-xa"))
    progress.attempt(0)
    progress.take(said(2, 3, text="bc"))
    sample = progress.result(latest=1)
    assert (sample.text, sample.whole.finish_reason.matched_string) == ("-x", "ab")


def test_a_stop_string_counts_from_the_least_number_of_tokens_on() -> None:
    progress = Progress(begin(request(stop=["ab"], min_new_tokens=3)))
    progress.attempt(0)
    progress.take(said(1, text="a"))
    progress.attempt(0)
    progress.take(said(2, text="b"))
    assert not progress.finished
    for token in (3, 4):
        progress.take(said(token, start=token - 2, text="c"))
    assert not progress.finished
    assert progress.result(latest=1).text == "abcc"


def test_what_is_known_of_the_prompt_is_had_once() -> None:
    scores = [r.TokenLogprob(token_id=token, logprob=-token) for token in PROMPT]
    progress = Progress(begin(r.GenerateRequest(text="ab", rid="mine", logprob_start_len=0)))
    rids = []
    for number, tokens in enumerate([[], [1], [2], [3]]):
        asked = progress.attempt(0)
        rids.append(asked.rid)
        assert asked.HasField("logprob_start_len") == (number < 2)
        told = said(*tokens, slot="a" if number < 3 else "b")
        told.prompt_ids.extend([*PROMPT, *[1, 2, 3][: max(number - 1, 0)]])
        told.input_logprobs.extend(scores)
        progress.take(told)
        assert not progress.ended
        progress.take(said(finish=r.FINISH_TYPE_ABORT, start=1))
    sample = progress.result(latest=1)
    assert list(sample.prompt_ids) == PROMPT
    assert list(sample.input_logprobs) == scores
    assert rids[0] == "mine"
    assert Progress(begin(request())).attempt(0).rid
    assert len(set(rids)) == 4, "a rid that an engine may still have is not used again"
    assert [(part.slot, part.start) for part in sample.parts] == [("a", 0), ("b", 2)]


def test_a_sample_that_fills_the_context_has_ended_by_its_length() -> None:
    refused = Reason.PROMPT_TOO_LONG.error()
    progress = Progress(begin(request()))
    progress.attempt(0)
    assert not progress.full(refused), "the prompt alone is too long"
    progress.take(said(1))
    progress.attempt(0)
    assert not progress.full(Reason.FIELD_INVALID.error())
    assert progress.full(refused)
    assert progress.result(1).finish == "length"


def test_a_failure_carries_the_samples() -> None:
    samples = [begin(request()), RolloutSample(request(), r.Sample(), [], (), "s")]
    error = RolloutFailed(Reason.UNREACHABLE.error("the host is down"), samples)
    assert (error.reason, error.message) == (Reason.UNREACHABLE, "2 of 2 samples were cut: the host is down")
    assert error.status == "UNAVAILABLE"
    assert len(error.samples) == 2
