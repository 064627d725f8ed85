"""What a figure is: what is measured, in which unit, against which goal; and what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tools.benchmark.rounds import Spread

T = TypeVar("T")

ROUNDS = 7
"""Fewest rounds of a full run."""


class Setting:
    """One run of a benchmark: its size, and what its figures share.

    Attributes:
        quick: sizes and rounds are small; the figures then show that everything works, and nothing about speed.
        rounds: measured rounds after the warm-up.
        directory: for files; it goes away with the run.
    """

    def __init__(self, directory: Path, *, quick: bool, say: Callable[[str], None] = lambda _: None) -> None:
        """``say`` is told what happens, a line each."""
        self.quick = quick
        self.rounds = 2 if quick else ROUNDS
        self.directory = directory
        self.say = say
        self._made: dict[object, Any] = {}
        self._open = ExitStack()
        self._shared: tuple[object, Any] = (None, None)

    def once(self, make: Callable[[Setting], T]) -> T:
        """What ``make(setting)`` returns, made when it is first asked for: figures of the same rounds share them."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def shared(self, context: Callable[[Setting], AbstractContextManager[T]]) -> T:
        """What the context gives. It stays open for the figures that follow, until :meth:`close`."""
        if self._shared[0] is not context:
            self.close()
            self._shared = (context, self._open.enter_context(context(self)))
        given: T = self._shared[1]
        return given

    def close(self) -> None:
        """Leave what is shared."""
        self._shared = (None, None)
        self._open.close()


@dataclass(frozen=True)
class Reading:
    """What was measured.

    Attributes:
        value: median over the rounds, in the figure's unit.
        low, high: first and third quartile.
        floor: what the peer reached in the same rounds, in ``floor_unit``; None: there is no peer.
        details: what explains the value, by a name that ends in its unit ("control_ms").
    """

    value: float
    low: float
    high: float
    floor: float | None = None
    floor_unit: str = ""
    details: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spread: Spread, *, floor: float | None = None, floor_unit: str = "", **details: float) -> Reading:
        """A reading from the spread of its rounds."""
        return cls(spread.median, spread.low, spread.high, floor, floor_unit, details)


@dataclass(frozen=True)
class Figure:
    """One figure of a benchmark.

    Attributes:
        id: its name, unique in the benchmark.
        what: what is measured, in words.
        unit: "ratio", "ms" and so on.
        measure: does it.
        at_least, at_most: the goal; neither: the figure is only reported.
    """

    id: str
    what: str
    unit: str
    measure: Callable[[Setting], Reading]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def goal(self) -> float | None:
        """The limit, or None."""
        return self.at_most if self.at_least is None else self.at_least

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most
