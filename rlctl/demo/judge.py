"""The promises of the demo, checked at each step and at the end. The demo ends at the first broken promise."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RISE = 0.1
"""Least rise of the mean reward on the evaluation set, in the GRPO part alone."""

MISMATCH = 1e-4
"""Largest |log probability of the engine − of the trainer| to expect in float32."""

LEVEL = "expected"
"""Level of verification required of every update at every engine."""

EVIDENCE = "rank"
"""Evidence required of every digest."""


@dataclass
class Step:
    """Observations of one step.

    Attributes:
        version: label of the fleet's version after the step.
        reward: mean over the step's rollouts, sampled at temperature 1.
        tokens_per_s: generated tokens over the time of the rollout; over the whole step if both run together.
        pause_ms: from the first engine's pause to the last engine's resume; whole, on the coordinator's clock.
        transfer_ms: from the first tensor to the last byte sent.
        max_logprob_diff: largest |log probability of the engine − of the trainer| over the rollouts, each token under
            the weights of the version that the engine reports for the token.
        digests: model digest reported by each engine after the step, by slot.
        expected: model digest of the trainer's weights, with the function and key of the engines' digests.
        contents: SHA-256 model digest of the trainer's weights.
        verified: level of the update's verification, by slot.
        evidence: weakest evidence of the ranks for the digests, by slot: ``rank`` if every rank answered for itself.
        staleness: versions between the oldest trained token and the trained weights.
        dropped: number of prompts so far with samples too old for training.
        problem: cause of the step's failure, or "".
    """

    step: int
    version: str = ""
    reward: float = 0.0
    tokens_per_s: float = 0.0
    pause_ms: float = 0.0
    transfer_ms: float = 0.0
    max_logprob_diff: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)
    expected: str = ""
    contents: str = ""
    verified: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)
    staleness: int = 0
    dropped: int = 0
    problem: str = ""

    def json(self) -> dict[str, Any]:
        """Return the step as an object of the demo's --json output."""
        return {"kind": "step"} | asdict(self) | {"checksums_equal": self.checksums_equal}

    @property
    def checksums_equal(self) -> bool:
        """Return True if every engine holds exactly the trainer's weights."""
        return bool(self.digests) and set(self.digests.values()) == {self.expected}


class Judge:
    """Checks each step at its end."""

    def __init__(self, max_staleness: int = 0) -> None:
        """``max_staleness``: most versions between samples and trained weights."""
        self._max_staleness = max_staleness
        self.steps: list[Step] = []

    def look(self, step: Step) -> str:
        """Return the cause of the step's failure, or ""."""
        before = self.steps[-1].contents if self.steps else ""
        self.steps.append(step)
        if not step.problem:
            step.problem = self._problem(step, before)
        return step.problem

    def _problem(self, step: Step, before: str) -> str:
        if not step.checksums_equal:
            differing_slots = [slot for slot, digest in sorted(step.digests.items()) if digest != step.expected]
            return f"weights of {', '.join(differing_slots) or 'every engine'} are not the trainer's"
        if step.contents == before:
            return "the trainer's weights did not change"
        for slot in sorted(step.digests):
            if (level := step.verified.get(slot, "none")) != LEVEL:
                return f"{slot} was verified at level {level}, not {LEVEL}"
            if (evidence := step.evidence.get(slot, "none")) != EVIDENCE:
                return f"the digest of {slot} has evidence {evidence}, not {EVIDENCE}"
        if not step.max_logprob_diff < MISMATCH:
            return f"log probabilities differ by {step.max_logprob_diff:.2g}, above {MISMATCH:g}"
        if step.staleness > self._max_staleness:
            return f"samples were {step.staleness} versions behind, above {self._max_staleness}"
        return ""

    def verdict(self, first: float, last: float) -> Verdict:
        """Return the verdict. ``first``, ``last``: mean reward on the evaluation set before and after GRPO."""
        problems = [step.problem for step in self.steps if step.problem]
        if not problems and round(last - first, 9) < RISE:
            problems = [f"the greedy reward rose by {last - first:.2f}, less than {RISE:g}"]
        return Verdict(
            reward_first=first,
            reward_last=last,
            checksums_equal=bool(self.steps) and all(step.checksums_equal for step in self.steps),
            max_logprob_diff=max((step.max_logprob_diff for step in self.steps), default=0.0),
            max_staleness=max((step.staleness for step in self.steps), default=0),
            steps=len(self.steps),
            problem=problems[0] if problems else "",
        )


@dataclass(frozen=True)
class Verdict:
    """The result of the demo."""

    reward_first: float
    reward_last: float
    checksums_equal: bool
    max_logprob_diff: float
    max_staleness: int
    steps: int
    problem: str

    @property
    def passed(self) -> bool:
        """Return True if no promise was broken."""
        return not self.problem

    def json(self) -> dict[str, Any]:
        """Return the last object of the demo's --json output."""
        return {"kind": "verdict"} | asdict(self) | {"passed": self.passed}
