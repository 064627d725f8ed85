"""Figures of a benchmark: measured quantity, unit and goal; and readings of figures."""

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
    """A run of a benchmark: its size, and values that its figures share.

    Attributes:
        quick: small sizes and few rounds; the figures then show that everything works, and nothing about speed.
        rounds: measured rounds after the warm-up.
        directory: for files; deleted after the run.
    """

    def __init__(self, directory: Path, *, quick: bool, say: Callable[[str], None] = lambda _: None) -> None:
        """``say``: gets remarks on the progress, a line each."""
        self.quick = quick
        self.rounds = 2 if quick else ROUNDS
        self.directory = directory
        self.say = say
        self._made: dict[object, Any] = {}
        self._open = ExitStack()
        self._shared: tuple[object, Any] = (None, None)

    def once(self, make: Callable[[Setting], T]) -> T:
        """Return ``make(setting)``, computed at the first call: figures from the same rounds share the result."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def shared(self, context: Callable[[Setting], AbstractContextManager[T]]) -> T:
        """Return the value of a context. The context stays open for the following figures, until :meth:`close`."""
        if self._shared[0] is not context:
            self.close()
            self._shared = (context, self._open.enter_context(context(self)))
        given: T = self._shared[1]
        return given

    def close(self) -> None:
        """Leave the shared context."""
        self._shared = (None, None)
        self._open.close()


@dataclass(frozen=True)
class Reading:
    """The result of a measurement.

    Attributes:
        value: median over the rounds, in the figure's unit.
        low, high: first and third quartile.
        floor: the peer's value in the same rounds, in ``floor_unit``; None: there is no peer.
        details: explaining values, with names that end in their unit ("control_ms").
    """

    value: float
    low: float
    high: float
    floor: float | None = None
    floor_unit: str = ""
    details: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, spread: Spread, *, floor: float | None = None, floor_unit: str = "", **details: float) -> Reading:
        """Return a reading from the spread of its rounds."""
        return cls(spread.median, spread.low, spread.high, floor, floor_unit, details)


@dataclass(frozen=True)
class Figure:
    """A figure of a benchmark.

    Attributes:
        id: its name, unique in the benchmark.
        what: the measured quantity, in words.
        unit: "ratio", "ms" and so on.
        measure: function that measures the figure.
        at_least, at_most: the goal; without a goal the figure is only reported.
    """

    id: str
    what: str
    unit: str
    measure: Callable[[Setting], Reading]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def goal(self) -> float | None:
        """Return the limit, or None."""
        return self.at_most if self.at_least is None else self.at_least

    def met(self, value: float) -> bool:
        """Return True if a value reaches the goal."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most
