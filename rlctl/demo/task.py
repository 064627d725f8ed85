"""The task: the prompt "3+5=" has the answer "8". Learnt in seconds, and every answer is right or wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

CHARACTERS = "0123456789+="
MAX_NEW_TOKENS = 4


@dataclass(frozen=True)
class Problem:
    """A sum."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    def reward(self, text: str) -> float:
        """Return 1.0 for exactly the right answer, else 0.0."""
        return float(text == self.answer)


EVERY = [Problem(left, right) for left in range(10) for right in range(10)]
"""All problems; also the fixed evaluation set."""


def draw(generator: random.Random, count: int) -> list[Problem]:
    """Draw problems for one step."""
    return generator.sample(EVERY, count)
