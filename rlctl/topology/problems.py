"""The problems of a topology, collected with places and raised together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlctl.contract.errors import Reason, RlctlError

COMMAND_LINE = "command line"
"""Source of a problem that is in no file."""
LONGEST = 400
"""Longest key or message, characters."""


@dataclass(frozen=True)
class Problem:
    """An error or warning.

    Attributes:
        source: the file, or "command line".
        line: 1-based; 0 without a line.
        key: path of the key, "sglang[0].server_groups[1].num_gpus"; a flag's name on the command line.
        message: the defect and the expected value.
        warning: the topology can be run all the same.
    """

    source: str
    line: int
    key: str
    message: str
    warning: bool = False

    @property
    def place(self) -> str:
        """FILE:LINE."""
        return f"{self.source}:{self.line}" if self.line else self.source

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.place}: {'warning: ' if self.warning else ''}{key}{self.message}"

    @property
    def data(self) -> dict[str, Any]:
        """The problem as values for JSON."""
        return {
            "file": self.source,
            "line": self.line,
            "key": self.key,
            "message": self.message,
            "severity": "warning" if self.warning else "error",
        }


@dataclass
class Problems:
    """The problems of a file, without repeats.

    Attributes:
        source: the file.
    """

    source: str
    entries: list[Problem] = field(default_factory=list)
    _seen: set[Problem] = field(default_factory=set)

    def add(self, line: int, key: str, message: str, *, warning: bool = False, source: str = "") -> None:
        """Add a problem, with a long key or message cut."""
        problem = Problem(source or self.source, line, _cut(key), _cut(message), warning)
        if problem not in self._seen:
            self._seen.add(problem)
            self.entries.append(problem)

    @property
    def errors(self) -> list[Problem]:
        """Problems that are not warnings, by line."""
        return [problem for problem in self.in_order() if not problem.warning]

    def in_order(self) -> list[Problem]:
        """Return all problems, by line."""
        return sorted(self.entries, key=lambda problem: problem.line)

    def refuse(self) -> None:
        """Raise TOPOLOGY_INVALID with every error, if the problems include errors."""
        if self.errors:
            raise invalid(self.errors)


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def invalid(errors: list[Problem]) -> RlctlError:
    """Return the exception with all errors."""
    count = f"{len(errors)} problem{'s' if len(errors) > 1 else ''}"
    source = errors[0].source if errors[0].source != COMMAND_LINE else f"the {COMMAND_LINE}"
    message = "\n  ".join([f"{count} in {source}", *map(str, errors)])
    metadata = {f"{problem.place} {problem.key}".strip(): problem.message for problem in errors}
    return Reason.TOPOLOGY_INVALID.error(message, field=errors[0].key, metadata=metadata)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'x'?", or "" if no known word is similar."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
