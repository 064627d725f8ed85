"""The trainer: a supervised warm-up, then GRPO (group relative policy optimisation).

Advantages are rewards less their group's mean, over the group's standard deviation. The loss is PPO's clipped loss per
token, with the engine's log probabilities as the old policy's, and without a KL term.

Source of the method: Shao et al., "DeepSeekMath", 2024, section 4.1.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from rlctl.demo.task import EVERY, Problem, draw
from rlctl.demo.tiny import EOS, PAD, encode
from rlctl.rollout.sample import RolloutSample

CLIP = 0.2


@dataclass(frozen=True)
class Rollout:
    """A sample from the engine.

    Attributes:
        prompt: token ids.
        output: generated token ids.
        logprobs: the engine's log probability of each output token, natural logarithm.
        versions: sequence number of the version of each output token.
        reward: 0.0 or 1.0.
        group: number of the prompt, equal for all samples of the prompt.
    """

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[int]
    reward: float
    group: int


def rollouts(groups: Iterable[tuple[Problem, Iterable[RolloutSample]]]) -> list[Rollout]:
    """Return the samples of each problem, with the reward for the generated text."""
    return [
        Rollout(
            prompt=list(sample.prompt_ids),
            output=sample.output_ids,
            logprobs=sample.logprobs,
            versions=[version.sequence if version else 0 for version in sample.versions],
            reward=problem.reward(sample.text),
            group=number,
        )
        for number, (problem, samples) in enumerate(groups)
        for sample in samples
    ]


class Trainer:
    """Holds the model and its optimiser."""

    def __init__(self, model: Any, *, learning_rate: float, seed: int) -> None:
        self.model = model
        self._random = random.Random(seed)
        self._past: dict[int, dict[str, torch.Tensor]] = {}
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)

    def supervise(self, steps: int, batch: int) -> float:
        """Warm up on worked sums; return the last loss."""
        loss = torch.tensor(0.0)
        for _ in range(steps):
            problems = draw(self._random, min(batch, len(EVERY)))
            sequences = [[*encode(p.prompt + p.answer), EOS] for p in problems]
            starts = [len(encode(p.prompt)) for p in problems]
            tokens, mask = _padded(sequences)
            logits = self.model(input_ids=tokens, attention_mask=mask).logits
            targets = tokens.clone()
            for row, start in enumerate(starts):
                targets[row, :start] = PAD
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=PAD)
            self._apply(loss)
        return float(loss.detach())

    def remember(self, version: int, keep: int = 1) -> None:
        """Record the present weights as this version's; keep the weights of the ``keep`` newest versions."""
        self._past[version] = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for old in sorted(self._past)[:-keep]:
            del self._past[old]

    def mismatch(self, rollouts: Sequence[Rollout]) -> float:
        """Return the largest |log probability of the engine − of the trainer| of a token, by its version's weights."""
        versions, engine_logprobs, mask = (
            _rows([getattr(r, name) if name else [1.0] * len(r.output) for r in rollouts])
            for name in ("versions", "logprobs", "")
        )
        worst = 0.0
        for version in sorted(set(versions[mask > 0].tolist())):
            if version not in self._past:
                return float("inf")  # a version that was never trained, or is unknown
            with torch.no_grad():
                difference = (self.logprobs(rollouts, self._past[version]) - engine_logprobs).abs()
            worst = max(worst, float(difference[(versions == version) & (mask > 0)].max()))
        return worst

    def logprobs(self, rollouts: Sequence[Rollout], weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Return log probabilities of the output tokens, (rollouts, longest output), 0 beyond.

        ``weights``: tensors by name, in place of the present weights.
        """
        tokens, mask = _padded([r.prompt + r.output for r in rollouts])
        inputs = {"input_ids": tokens, "attention_mask": mask}
        logits = torch.func.functional_call(self.model, weights or {}, (), inputs).logits.float()
        token_logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        longest = max(len(r.output) for r in rollouts)
        rows = []
        for row, rollout in enumerate(rollouts):
            start = len(rollout.prompt) - 1
            part = token_logprobs[row, start : start + len(rollout.output)]
            rows.append(torch.nn.functional.pad(part, (0, longest - len(rollout.output))))
        return torch.stack(rows)

    def step(self, rollouts: Sequence[Rollout]) -> float:
        """Take a GRPO step; return the :meth:`mismatch` before the step."""
        difference = self.mismatch(rollouts)
        new = self.logprobs(rollouts)
        old, mask = _rows([r.logprobs for r in rollouts]), _rows([[1.0] * len(r.output) for r in rollouts])
        advantages = _advantages(rollouts)[:, None]
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / mask.sum()
        self._apply(loss)
        return difference

    def _apply(self, loss: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


def _advantages(rollouts: Sequence[Rollout]) -> torch.Tensor:
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout.reward)
    statistics = {}
    for group, rewards in groups.items():
        values = torch.tensor(rewards)
        statistics[group] = (values.mean(), values.std(unbiased=False) + 1e-4)
    return torch.stack([(torch.tensor(r.reward) - statistics[r.group][0]) / statistics[r.group][1] for r in rollouts])


def _rows(values: Sequence[Sequence[float]]) -> torch.Tensor:
    """Return (rollouts, longest output), 0 beyond."""
    longest = max(map(len, values))
    return torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in values])


def _padded(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and attention mask, (sequences, longest). A sampled pad token is attended to like any token."""
    longest = max(len(sequence) for sequence in sequences)
    tokens = torch.tensor([[*sequence, *[PAD] * (longest - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return tokens, mask
