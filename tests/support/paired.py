"""Requests to a pair of a prefill and a decode engine: over HTTP, during updates, and after kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import changed, greedy
from up_helpers import known, when

from rlctl.contract.errors import RlctlError
from rlctl.sdk.blocking import Fleet

PROMPT = [number % 13 + 1 for number in range(40)]
SAMPLING: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG = 250
"""Tokens of a sample that a kill catches in the middle."""


def over_http(url: str, **sampling: Any) -> list[int]:
    """Return the output of the model's gateway, or of the router in front of the gateway."""
    body = {"input_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        told: dict[str, Any] = json.loads(response.read())
    ids: list[int] = told["output_ids"]
    return ids


def updated_meanwhile(fleet: Fleet, rollout: Any, model: Any, *updates: dict[str, Any]) -> None:
    """Update during requests, once per settings: every token matches the weights of its version."""
    weights = {1: model}
    with contextlib.closing(fleet.publisher("actor")) as publisher, ThreadPoolExecutor(1) as pool:
        for step, settings in enumerate(updates, start=2):
            weights[step] = changed(model, step)
            running = pool.submit(
                rollout.generate_batch, [[*PROMPT, n] for n in range(1, 5)], max_new_tokens=40, **SAMPLING
            )
            something_runs(fleet)
            assert publisher.update(weights[step], version=f"step-{step}", **settings).version.sequence == step
            for number, [sample] in enumerate(running.result(), start=1):
                tokens = torch.tensor([[*PROMPT, number, *sample.output_ids]])
                likely = {each: weights[each](input_ids=tokens).logits[0].argmax(-1).tolist() for each in weights}
                for at, (token, version) in enumerate(
                    zip(sample.output_ids, sample.versions, strict=True), start=len(PROMPT)
                ):
                    assert likely[version.sequence][at] == token
            [sample] = rollout.generate(PROMPT, max_new_tokens=4, **SAMPLING)
            assert {version.sequence for version in sample.versions} == {step}
            assert sample.output_ids == greedy(weights[step], PROMPT, 4)


def something_runs(fleet: Fleet) -> None:
    """Wait until a pair generates: earlier requests have begun too."""
    with contextlib.closing(fleet.generate_stream(PROMPT, max_new_tokens=400, **SAMPLING)) as parts:
        next(parts)


def killed_meanwhile(fleet: Fleet, rollout: Any, slot: str, name: str = "pairs") -> None:
    """Check that samples go on after the engine's restart, and that a short request ends at its deadline."""
    when(fleet, lambda now: len(now) == 2 and all(stage.routable for stage in now.values()))
    (latest,) = (each.latest.sequence for each in fleet.status().models)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(rollout.generate, PROMPT, n=4, max_new_tokens=LONG, **SAMPLING)
        something_runs(fleet)
        os.kill(known(name).processes[slot], signal.SIGKILL)
        hurried = pool.submit(fleet.generate, PROMPT, max_new_tokens=4, timeout_s=1.0, **SAMPLING)
        with pytest.raises(RlctlError) as caught:
            hurried.result(timeout=5)
        assert caught.value.reason.name in ("NO_ROUTABLE_STAGE", "DEADLINE_EXCEEDED", "UNREACHABLE")
        samples = running.result()
    assert all(len(sample.output_ids) == LONG and sample.finished for sample in samples)
    assert all({version.sequence for version in sample.versions if version} == {latest} for sample in samples)
