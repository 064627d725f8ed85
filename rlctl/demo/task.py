"""The task: "3+5=" is to be answered "8". Small enough to learn in seconds, and an answer is right or wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

CHARACTERS = "0123456789+="
MAX_NEW_TOKENS = 4


@dataclass(frozen=True)
class Problem:
    """One sum."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model sees."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What it should say."""
        return str(self.left + self.right)

    def reward(self, text: str) -> float:
        """1.0 for the right answer and nothing else, 0.0 otherwise."""
        return float(text == self.answer)


EVERY = [Problem(left, right) for left in range(10) for right in range(10)]
"""All there are; also the fixed evaluation set."""


def draw(generator: random.Random, count: int) -> list[Problem]:
    """Problems for one step."""
    return generator.sample(EVERY, count)
