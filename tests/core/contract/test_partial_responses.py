"""A streamed answer put together."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from rlctl.contract.partial_responses import Merged, MergedSample
from rlctl.rollout.continuation import Progress, begin
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1.common_pb2 import WeightVersion

PARTS, TEXT = 4000, "token" * 10
"""All states of such a text together are 400 MB."""


def resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def merged(parts: list[r.GenerateResponse]) -> r.Sample:
    whole = Merged()
    for part in parts:
        whole.add(part)
    return whole.message().samples[0]


def progressed(parts: list[r.GenerateResponse]) -> r.Sample:
    progress = Progress(begin(r.GenerateRequest(text="x")))
    progress.attempt(0)
    for part in parts:
        progress.take(part)
    return progress.result(latest=1).whole


@pytest.mark.parametrize("put_together", [merged, progressed])
def test_a_long_answer_takes_no_more_memory_than_it_has(
    put_together: Callable[[list[r.GenerateResponse]], r.Sample],
) -> None:
    parts = [
        r.GenerateResponse(samples=[r.Sample(text=TEXT, output_ids=[n], completion_tokens=n + 1)]) for n in range(PARTS)
    ]
    before = resident_mb()
    whole = put_together(parts)
    assert resident_mb() - before < 50
    assert whole.text == TEXT * PARTS
    assert list(whole.output_ids) == list(range(PARTS))


def test_merging_parts_gives_the_whole() -> None:
    version = WeightVersion(label="v", sequence=1)
    merged = Merged()
    for index, token in ((0, 5), (1, 6), (0, 7)):
        count = 1 + sum(s.completion_tokens for s in merged.message().samples if s.index == index)
        sample = r.Sample(index=index, text=str(token), output_ids=[token], completion_tokens=count)
        sample.versions.add(version=version, start=count - 1, end=count)
        merged.add(r.GenerateResponse(rid="x", prompt_tokens=4, samples=[sample]))
    whole = merged.message()
    assert (whole.rid, whole.prompt_tokens) == ("x", 4)
    assert [(s.index, s.text, list(s.output_ids), len(s.versions)) for s in whole.samples] == [
        (0, "57", [5, 7], 1),
        (1, "6", [6], 1),
    ]
    assert whole.samples[0].versions[0].end == 2


def test_of_what_an_engine_says_beside_the_tokens_the_last_holds() -> None:
    merged = Merged()
    for number in (1, 2):
        part = r.GenerateResponse(rid="x", prompt_ids=[7] if number == 1 else [], samples=[r.Sample(text=str(number))])
        part.samples[0].engine_meta["step"] = number
        part.elapsed.seconds = number
        merged.add(part)
    whole = merged.message()
    assert (list(whole.prompt_ids), whole.elapsed.seconds, dict(whole.samples[0].engine_meta)) == ([7], 2, {"step": 2})


def test_stretches_of_output_are_one_only_where_they_meet_and_were_generated_alike() -> None:
    old, new = WeightVersion(label="old", sequence=1), WeightVersion(label="new", sequence=2)
    sample = MergedSample(r.Sample())
    for start, end, version, kv in (
        (0, 1, old, old),
        (1, 2, old, old),
        (3, 4, old, old),
        (4, 5, new, old),
        (5, 6, new, new),
    ):
        part = r.Sample()
        part.versions.add(start=start, end=end, version=version, kv_version=kv)
        sample.add(part)
    whole = r.Sample()
    sample.fill(whole)
    assert [(span.start, span.end) for span in whole.versions] == [(0, 2), (3, 4), (4, 5), (5, 6)]


def test_a_sample_that_goes_on_keeps_what_was_said_of_it() -> None:
    had = r.Sample(text="a")
    had.engine_meta["step"] = 1
    sample = MergedSample(had)
    sample.add(r.Sample(text="b"))
    whole = r.Sample()
    sample.fill(whole)
    assert (whole.text, dict(whole.engine_meta)) == ("ab", {"step": 1})
    nothing = r.Sample()
    MergedSample(r.Sample()).fill(nothing)
    assert nothing == r.Sample()
