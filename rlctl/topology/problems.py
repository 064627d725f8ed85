"""What is wrong with a topology: collected, not raised one by one, each with its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlctl.contract.errors import Reason, RlctlError

COMMAND_LINE = "command line"
"""Source of what no file says."""
LONGEST = 400
"""Characters of a key or a message."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        source: the file, or "command line".
        line: 1-based; 0 where there is none.
        key: path of the key, "sglang[0].server_groups[1].num_gpus"; a flag's name on the command line.
        message: what is wrong and what was expected.
        warning: it can be done all the same.
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
        """For JSON."""
        return {
            "file": self.source,
            "line": self.line,
            "key": self.key,
            "message": self.message,
            "severity": "warning" if self.warning else "error",
        }


@dataclass
class Problems:
    """Those of one file, in the order of their lines.

    Attributes:
        source: the file.
    """

    source: str
    found: list[Problem] = field(default_factory=list)
    _seen: set[Problem] = field(default_factory=set)

    def add(self, line: int, key: str, message: str, *, warning: bool = False, source: str = "") -> None:
        """One more; what is quoted in it at length is cut."""
        problem = Problem(source or self.source, line, _cut(key), _cut(message), warning)
        if problem not in self._seen:
            self._seen.add(problem)
            self.found.append(problem)

    @property
    def errors(self) -> list[Problem]:
        """What must not be."""
        return [problem for problem in self.in_order() if not problem.warning]

    def in_order(self) -> list[Problem]:
        """Everything, by line."""
        return sorted(self.found, key=lambda problem: problem.line)

    def refuse(self) -> None:
        """Raise TOPOLOGY_INVALID with every error, if there is one."""
        if self.errors:
            raise invalid(self.errors)


def _cut(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def invalid(errors: list[Problem]) -> RlctlError:
    """The exception that tells all of them."""
    count = f"{len(errors)} problem{'s' if len(errors) > 1 else ''}"
    source = errors[0].source if errors[0].source != COMMAND_LINE else f"the {COMMAND_LINE}"
    message = "\n  ".join([f"{count} in {source}", *map(str, errors)])
    metadata = {f"{problem.place} {problem.key}".strip(): problem.message for problem in errors}
    return Reason.TOPOLOGY_INVALID.error(message, field=errors[0].key, metadata=metadata)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or "" when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
