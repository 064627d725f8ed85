"""The harness's own arithmetic: rounds, spreads, goals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.report import entry
from tools.benchmark.rounds import Spread, interleaved, ratios
from tools.benchmark.weights.collectives import busy_s


def test_sides_take_turns_after_a_warm_up_that_does_not_count() -> None:
    ran: list[str] = []

    def side(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    results = interleaved(2, {name: lambda name=name: side(name) for name in "ab"})  # type: ignore[misc]
    assert ran == ["a", "b", "a", "b", "b", "a"]
    assert results == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([1.0, 10.0, 3.0], [1.0, 5.0, 1.0]) == Spread(2.0, 1.5, 2.5)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


def test_goals_have_a_direction_and_a_reported_figure_has_none(tmp_path: Path) -> None:
    def measure(setting: Setting) -> Reading:
        return Reading.of(Spread.of([0.5]), floor=2.0, floor_unit="s", control_ms=1.0)

    def met(**goal: float) -> tuple[float | None, bool]:
        figure = Figure("f", "what", "ratio", measure, **goal)
        made = entry(figure, measure(Setting(tmp_path, quick=True)))
        assert (made["value"], made["floor"], made["details"]) == (0.5, 2.0, {"control_ms": 1.0})
        return made["goal"], made["met"]

    assert met(at_least=0.4) == (0.4, True)
    assert met(at_least=0.6) == (0.6, False)
    assert met(at_most=0.4) == (0.4, False)
    assert met(at_most=0) == (0, False)
    assert met() == (None, True)


def test_what_figures_share_is_made_once_and_left_when_another_is_asked_for(tmp_path: Path) -> None:
    events: list[str] = []

    def context(name: str) -> contextlib.AbstractContextManager[str]:
        @contextlib.contextmanager
        def running() -> Iterator[str]:
            events.append(f"+{name}")
            yield name
            events.append(f"-{name}")

        return running()

    def one(_: Setting) -> contextlib.AbstractContextManager[str]:
        return context("one")

    def other(_: Setting) -> contextlib.AbstractContextManager[str]:
        return context("other")

    with contextlib.closing(Setting(tmp_path, quick=True)) as setting:
        assert [setting.shared(one), setting.shared(one), setting.shared(other)] == ["one", "one", "other"]
        assert events == ["+one", "-one", "+other"]
        assert setting.once(lambda _: len(events)) == 3
    assert events == ["+one", "-one", "+other", "-other"]


def test_only_waiting_that_nobody_uses_is_control_time() -> None:
    sending = [(1.0, 3.0), (4.0, 6.0)]
    first = ([(2.0, 2.5), (2.5, 6.0)], [(6.0, 6.5)])
    second = ([(2.2, 3.5), (3.6, 6.1)], [])
    # From 2.0 a rank receives; until 3.5 the other one does; from 4.0 all are in the next one; then one copies.
    assert busy_s(sending, [first, second]) == pytest.approx((3.5 - 2.0) + (6.5 - 4.0))
