"""Tokens in flight while SGLang's label changes; without SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from rlctl_sglang.ranks.plugin import count_in_flight, forget_in_flight


def request(*tokens: int) -> Any:
    return SimpleNamespace(output_ids=list(tokens))


def recorded(scheduler: Any, *requests: Any) -> list[int]:
    """Return the number of tokens that SGLang counts of each request, and check that none has changed after it."""
    before = [list(each.output_ids) for each in requests]
    counts: list[int] = []

    def record(_: Any, *, new_version: str) -> None:
        assert new_version == "new"
        counts.extend(len(each.output_ids) for each in requests)

    count_in_flight(record, scheduler, new_version="new")
    assert [each.output_ids for each in requests] == before
    return counts


def scheduler(*in_flight: Any, chunked: Any = None, speculative: bool = False) -> Any:
    return SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
        result_queue=[(SimpleNamespace(reqs=list(in_flight)), None)] if in_flight else [],
        chunked_req=chunked,
    )


def test_a_token_in_flight_belongs_to_the_old_label() -> None:
    running, first, waiting = request(1, 2), request(), request(3)
    assert recorded(scheduler(running, first), running, first, waiting) == [3, 1, 1]
    assert recorded(scheduler(), running, first, waiting) == [2, 0, 1]


def test_a_chunk_of_a_prompt_computes_no_token() -> None:
    chunked = request()
    assert recorded(scheduler(chunked, chunked=chunked), chunked) == [0]


def test_an_unknown_number_of_tokens_is_not_counted() -> None:
    running = request(1)
    assert recorded(scheduler(running, speculative=True), running) == [1]


def test_another_sglang_records_its_label_all_the_same() -> None:
    running = request(1)
    assert recorded(SimpleNamespace(), running) == [1]


@dataclass(frozen=True, slots=True)
class Event:
    """SGLang's ``WeightVersionEvent``."""

    old_version: str
    num_output_tokens: int


@pytest.mark.parametrize(
    ("tokens", "embeds", "kept"),
    [((1, 2), None, [2, 2]), ((1, 2, 3), None, [2, 3]), ((), None, []), ((), [0.5], [2, 3])],
)
def test_a_retracted_request_has_no_token_in_flight(tokens: tuple[int, ...], embeds: Any, kept: list[int]) -> None:
    retracted = request(*tokens)
    retracted.input_embeds = embeds
    retracted.weight_version_events = [Event("a", 2), Event("b", 3)]
    forget_in_flight(None, retracted)
    assert [event.num_output_tokens for event in retracted.weight_version_events] == kept


def test_a_failed_record_leaves_the_tokens_as_they_were() -> None:
    running = request(1)

    def record(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        count_in_flight(record, scheduler(running))
    assert running.output_ids == [1]
