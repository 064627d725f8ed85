"""Failures that users of other systems had: what old weights have computed is used under new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from updating import from_disk

from rlctl.demo import tiny
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.channel import open_channel
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

PROMPT = tiny.encode("12+34=46+56+78=")
COUNT = 12


def greedy(model: Any) -> list[int]:
    """What the model itself says after the prompt."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(COUNT):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


async def said(fleet: InProcessFleet) -> list[int]:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        params = SamplingParams(max_new_tokens=COUNT, temperature=0, ignore_eos=True)
        request = GenerateRequest(input_ids=TokenIds(ids=PROMPT), sampling_params=params)
        return list((await RolloutServiceStub(channel).Generate(request)).samples[0].output_ids)


async def test_incident_16_no_prefix_that_old_weights_computed_survives_an_update(tmp_path: Path) -> None:
    expected = {}
    for seed in (1, 2):
        model = tiny.make(seed)
        tiny.save(model, tmp_path / str(seed))
        expected[seed] = greedy(model)
    assert expected[1] != expected[2]
    async with InProcessFleet(tmp_path / "j.db", [StageSpec("a", str(tmp_path / "1"), engine="torch")]) as fleet:
        assert await said(fleet) == await said(fleet) == expected[1]
        await from_disk(fleet, str(tmp_path / "2"))
        assert await said(fleet) == expected[2]
