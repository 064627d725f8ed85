"""Updates of a real engine server by every path, on a CPU or a GPU: each is verified at level expected by every rank.

A module imports these tests (``from path_suite import *``), and defines the server by its fixture ``served``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds
from models import changed

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.verbs_pb2 import CheckWeightsRequest

NEAR = {"cpu": 1e-3, "cuda": 0.1}
"""Largest difference between log probabilities of the server and of transformers in float32: on a GPU the server
computes in bfloat16."""

COUNT = 12
LONG = 400
"""Tokens of a request that runs during an update."""

BACKENDS = ("gloo", "nccl")

PATHS = [
    "segments",
    "gloo",
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2, reason="NCCL takes each member of a group on a GPU of its own"
        ),
    ),
    "disk",
]


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")


def in_bfloat16(model: Any, directory: Path) -> tuple[Any, Path]:
    """Return the model in the dtype that attention kernels of GPUs compute in, and save it."""
    other = copy.deepcopy(model).to(torch.bfloat16)
    other.config.dtype = torch.bfloat16
    tiny.save(other, directory)
    return other, directory


@dataclass(frozen=True)
class Served:
    """A fleet of engine servers.

    Attributes:
        model: the model of the servers' checkpoint.
        ranks: number of ranks of each server.
        device: device of the ranks and of the trainer's tensors.
        stages: the ranks can make shadow copies.
    """

    fleet: Fleet
    model: Any
    ranks: int = 1
    device: str = "cpu"
    stages: bool = True


@pytest.fixture
def model(served: Served, request: pytest.FixtureRequest) -> Any:
    """Other weights for every test, on the device."""
    return changed(served.model, seed=sum(request.node.name.encode())).to(served.device)


def update(served: Served, model: Any, path: str, directory: Path, apply: str) -> rlctl.UpdateResult:
    settings: dict[str, Any] = {"apply": apply}
    if path == "disk":
        tiny.save(model, directory / "checkpoint")
        settings["checkpoint"] = str(directory / "checkpoint")
    transfer: dict[str, Any] = {"path": "ipc" if path == "segments" else "broadcast"}
    if path in BACKENDS:
        transfer["backend"] = path
    with served.fleet.publisher("actor", trainer="paths", **transfer) as publisher:
        return publisher.update(model, version=f"{path} {apply}", **settings)


def check(served: Served, model: Any, result: rlctl.UpdateResult) -> None:
    """Every rank has answered for itself, has the trainer's weights, and computes with them."""
    stages = result.operation.stage_results
    assert {stage.verified for stage in stages} == {common.VERIFICATION_LEVEL_EXPECTED}
    every = [common.EVIDENCE_VERIFIED] * served.ranks
    assert all([rank.evidence for rank in stage.rank_results] == every for stage in stages)
    for stage in served.fleet.call(CheckWeightsRequest()).stage_results:
        assert [rank.evidence for rank in stage.rank_results] == [common.EVIDENCE_RANK] * served.ranks
        assert holds([rank.check.model_digest for rank in stage.rank_results], model)
        serves(served, model, stage.slot, result.version)


def serves(served: Served, model: Any, slot: str, version: common.WeightVersion) -> None:
    """The log probabilities of a greedy request are those of transformers."""
    prompt = encode("3+")
    response = served.fleet.generate(
        prompt, max_new_tokens=COUNT, temperature=0.0, ignore_eos=True, return_logprob=True, slot=slot
    )
    (sample,) = response.samples
    tokens = list(sample.output_ids)
    assert [span.version.label for span in sample.versions] == [version.label]
    with torch.no_grad():
        exact = copy.deepcopy(model).cpu().float()
        logits = exact(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert [entry.logprob for entry in sample.output_logprobs] == pytest.approx(wanted, abs=NEAR[served.device])


@contextlib.contextmanager
def trainer_gpu(served: Served, model: Any, path: str) -> Iterator[Any]:
    """The model where the trainer sends it from: over NCCL from a GPU that no rank has."""
    if path != "nccl":
        yield model
        return
    last = torch.cuda.device_count() - 1
    if served.device == "cpu" or last < served.ranks:
        pytest.skip("no GPU remains for the trainer")
    with torch.cuda.device(last):
        yield model.to("cuda")


@pytest.mark.parametrize("path", PATHS)
def test_an_update_is_verified_at_level_expected_by_every_rank(
    served: Served, model: Any, path: str, tmp_path: Path
) -> None:
    with trainer_gpu(served, model, path) as sent:
        check(served, sent, update(served, sent, path, tmp_path, "in_place"))


@pytest.mark.parametrize("path", PATHS)
def test_a_staged_update_reaches_every_rank_while_a_request_runs(
    served: Served, model: Any, path: str, tmp_path: Path
) -> None:
    with trainer_gpu(served, model, path) as sent:
        if not served.stages:
            with pytest.raises(RlctlError) as refused:
                update(served, sent, path, tmp_path, "staged")
            assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "apply")
            return
        running = served.fleet.generate_stream(encode("7"), max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
        parts = [next(running)]
        result = update(served, sent, path, tmp_path, "staged")
        parts += running
        assert sum(len(part.samples[0].output_ids) for part in parts) == LONG
        check(served, sent, result)
