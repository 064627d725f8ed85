"""What the stages of a fleet generate, each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.client.fleet import Fleet
from rlctl.v1.rollout_pb2 import GenerateResponse


def of_each(
    fleet: Fleet, prompt: Sequence[int], *, slots: Sequence[str] = ("actor-0", "actor-1"), **settings: Any
) -> list[GenerateResponse]:
    """What each slot answers first. They are asked until all have answered: the SDK routes by a watch, which follows
    what changes at the coordinator within a moment."""
    answers: dict[str, GenerateResponse] = {}
    while not set(slots) <= answers.keys():
        for response in fleet.generate_batch([prompt] * len(slots), **settings):
            answers.setdefault(response.slot, response)
    return [answers[slot] for slot in slots]
