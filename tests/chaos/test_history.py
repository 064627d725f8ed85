"""The checker of histories finds what is wrong. One that finds nothing proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from history import Generation, History, Token, Update


def good() -> History:
    history = History({"a": 1, "b": 2})
    for number, time in ((2, 10.0), (3, 20.0)):
        ranks = {"a": ["APPLIED"], "b": ["APPLIED"] * 2}
        history.updates.append(Update(f"v{number}", time, 30, time + 2, "OK", "", number, ranks))
    history.generations = [
        Generation(1.0, 5, 2.0, "a", [Token(1.5, "initial", 1)]),
        Generation(9.0, 5, 12.5, "b", [Token(9.5, "initial", 1), Token(11.9, "v2", 2)]),
        Generation(13.0, 5, 13.5, "a", [Token(13.2, "v2", 2)]),
        Generation(20.5, 5, 22.5, "b", [Token(20.6, "v2", 2), Token(22.0, "v3", 3)]),
    ]
    return history


def test_a_good_history_is_good() -> None:
    assert good().violations() == []


def test_a_failed_call_may_have_happened_or_not() -> None:
    history = good()
    history.updates[1].state = ""
    assert history.violations() == []
    history.generations[3].tokens.pop()
    assert history.violations() == []
    history.updates[1].ended = None
    assert history.violations() == []


def early(history: History) -> None:
    history.generations[0].tokens = [Token(1.5, "v2", 2)]


def unknown(history: History) -> None:
    history.generations[2].tokens = [Token(13.2, "never", 2)]


def failed(history: History) -> None:
    history.updates[1].state = "FAILED"


def renumbered(history: History) -> None:
    history.generations[2].tokens = [Token(13.2, "v2", 4)]


def stale(history: History) -> None:
    history.generations[2].tokens = [Token(13.2, "initial", 1)]


def stale_though_never_ok(history: History) -> None:
    history.updates[0].state = ""
    stale(history)


def back(history: History) -> None:
    history.generations[3].tokens.append(Token(22.4, "v2", 2))


def repeated(history: History) -> None:
    history.updates[1].sequence = 2
    history.generations.pop()


def a_rank_is_missing(history: History) -> None:
    history.updates[0].ranks = {"a": ["APPLIED"], "b": ["APPLIED"]}


def a_rank_refused(history: History) -> None:
    history.updates[0].ranks = {"a": ["APPLIED"], "b": ["APPLIED", "REJECTED"]}


def a_stage_is_missing(history: History) -> None:
    history.updates[0].ranks = {"a": ["APPLIED"]}


def hangs(history: History) -> None:
    history.generations[1].ended = None


def late(history: History) -> None:
    history.updates[1].ended = 99.0


@pytest.mark.parametrize(
    "spoil",
    [
        early,
        unknown,
        failed,
        renumbered,
        stale,
        stale_though_never_ok,
        back,
        repeated,
        a_rank_is_missing,
        a_rank_refused,
        a_stage_is_missing,
        hangs,
        late,
    ],
)
def test_a_bad_history_is_found_out(spoil: Callable[[History], None]) -> None:
    history = good()
    spoil(history)
    assert history.violations()


def test_a_stage_that_was_left_out_need_not_confirm() -> None:
    history = good()
    a_stage_is_missing(history)
    history.updates[0].excluded = ["b"]
    assert history.violations() == []
