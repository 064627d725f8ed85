"""Responses of every stage of a fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlctl.sdk.blocking import Fleet
from rlctl.v1.rollout_pb2 import GenerateResponse

PATIENCE_S = 60.0


def of_each(fleet: Fleet, prompt: Sequence[int], **settings: Any) -> list[GenerateResponse]:
    """Return the first response of each stage, in slot order.

    Requests repeat until all stages have answered: the SDK routes by a watch, slightly behind the coordinator.
    """
    slots = sorted(stage.registration.slot for stage in fleet.status().stages)
    answers: dict[str, GenerateResponse] = {}
    deadline = time.monotonic() + PATIENCE_S
    while not set(slots) <= answers.keys():
        assert time.monotonic() < deadline, f"of {slots} only {list(answers)} answered: {fleet.status()}"
        for response in fleet.generate_batch([prompt] * len(slots), **settings):
            answers.setdefault(response.slot, response)
    return [answers[slot] for slot in slots]
