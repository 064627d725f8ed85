"""Rows of the operator guide's table of failures, and commands run as the operator runs them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from rlctl.cli.main import root

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "operator.md").read_text()
SECTION = GUIDE.split("\n## Failures and their marks\n")[1].split("\n## ")[0]
_CELLS = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", SECTION, re.MULTILINE)
ROWS = {failure: (seen, mend) for failure, seen, mend in _CELLS if failure != "failure"}
LONGEST_S = 150.0
"""Engines of a busy machine take a minute to load."""


def until(condition: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.2)


class Row:
    """A row of the guide: texts and commands in backticks are what the product must show and accept."""

    def __init__(self, failure: str) -> None:
        self.seen, self.mend = ROWS[failure]

    def shows(self, *shown: str, **names: str) -> None:
        """Assert that each text that the row quotes is shown, with the names in place of those in capitals."""
        for quoted in re.findall(r"`([^`]+)`", self.seen):
            if not quoted.startswith("rlctl "):
                assert _with(quoted, names) in "\n".join(shown), (quoted, shown)

    def step(self, command: str, **names: str) -> list[str]:
        """Return the words of a command that the row advises."""
        assert f"`{command}`" in self.mend, (command, self.mend)
        return _with(command, names).split()[1:]


def _with(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = re.sub(rf"\b{name}\b", value, text)
    return text


class Ran:
    """The end of a command."""

    def __init__(self, *words: str) -> None:
        result = CliRunner().invoke(root, list(words))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        assert "Traceback" not in self.out + self.err

    @property
    def data(self) -> Any:
        return json.loads(self.out)
