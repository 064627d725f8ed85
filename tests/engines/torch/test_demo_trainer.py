"""The demo's trainer notices a token that is not of the version that it is said to be of."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from rlctl.demo import tiny
from rlctl.demo.grpo import Rollout, Trainer


def scored(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    found = torch.log_softmax(logits, dim=-1)
    return [float(found[len(prompt) + i - 1, token]) for i, token in enumerate(output)]


def test_each_token_is_compared_under_the_weights_of_its_version() -> None:
    model = tiny.make(1)
    trainer = Trainer(model, learning_rate=1e-3, seed=0)
    older = copy.deepcopy(model)
    trainer.remember(1, keep=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    trainer.remember(2, keep=2)
    prompt, output = tiny.encode("12+34="), tiny.encode("4658")[-4:]
    old, new = scored(older, prompt, output), scored(model, prompt, output)
    mixed = Rollout(prompt, output, [*old[:2], *new[2:]], versions=[1, 1, 2, 2], reward=1.0, group=0)
    short = Rollout(prompt, output[:1], new[:1], versions=[2], reward=0.0, group=0)
    assert trainer.mismatch([mixed, short]) < 1e-4
    lie = dataclasses.replace(mixed, versions=[1, 2, 2, 2])
    assert trainer.mismatch([lie, short]) == pytest.approx(abs(old[1] - new[1]), abs=1e-4)
    assert abs(old[1] - new[1]) > 1e-3
    unknown = dataclasses.replace(mixed, versions=[1, 1, 2, 0])
    assert trainer.mismatch([unknown]) == float("inf")
