"""A mixture of experts on two ranks of a real SGLang: every element is found, written, and verified at every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_models
from digests import holds
from models import changed, greedy, mixture_of_experts

from rlctl.contract.errors import OperationFailed, Reason
from rlctl.demo import tiny
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model and the checkpoint that it was saved to."""
    model = mixture_of_experts()
    directory = tmp_path_factory.mktemp("experts") / "checkpoint"
    tiny.save(model, directory)
    return model, directory


@pytest.fixture(scope="module")
def fleet(
    sglang: str, experts: tuple[Any, Path], sabotaged: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A fleet of one server of two ranks."""
    environment = {**sabotaged, sglang_models.VARIABLE: sglang_models.all_but(sglang, "qwen3_moe")}
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    spec = EngineSpec("pair", str(experts[1]), engine="sglang", tp_size=2, environment=environment, options=options)
    with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
        yield fleet


def generates_like(fleet: Fleet, model: Any) -> None:
    response = fleet.generate(encode("3+"), max_new_tokens=12, temperature=0.0, ignore_eos=True)
    assert list(response.samples[0].output_ids) == greedy(model, encode("3+"), 12)


@pytest.mark.parametrize("path", ["ipc", "broadcast"])
def test_experts_reach_both_ranks(fleet: Fleet, experts: tuple[Any, Path], path: str) -> None:
    with fleet.publisher("actor", trainer="test", path=path) as publisher:
        model = changed(experts[0], seed=len(path))
        result = publisher.update(model, version=path)
    (stage,) = result.operation.stage_results
    assert stage.verified == common.VERIFICATION_LEVEL_EXPECTED
    assert [rank.evidence for rank in stage.rank_results] == [common.EVIDENCE_VERIFIED] * 2
    generates_like(fleet, model)


def test_experts_from_disk(fleet: Fleet, experts: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    model = changed(experts[0], seed=9)
    directory = tmp_path_factory.mktemp("disk") / "checkpoint"
    tiny.save(model, directory)
    fleet.update_weights_from_disk(str(directory), version="disk")
    generates_like(fleet, model)


def test_a_swapped_pair_of_experts_is_named_with_its_rank(
    fleet: Fleet, experts: tuple[Any, Path], sabotage: Path
) -> None:
    names = [f"model.layers.1.mlp.experts.{number}.down_proj.weight" for number in (1, 2)]
    with fleet.publisher("actor", trainer="test", path="ipc") as publisher:
        model = changed(experts[0], seed=11)
        sabotage.write_text(f"swap:{','.join(names)}@1")
        try:
            with pytest.raises(OperationFailed) as failed:
                publisher.update(model, version="swapped")
        finally:
            sabotage.unlink()
        (stage,) = failed.value.operation.stage_results
        assert (stage.outcome, stage.error.reason) == (common.OUTCOME_DIRTY, Reason.DIGEST_MISMATCH.name)
        reports = [rank.check.difference for rank in stage.rank_results]
        assert [(report.count, report.first, report.part.differs) for report in reports] == [
            (2, names[0], False),
            (2, names[0], True),
        ]
        result = publisher.update(model, version="whole")
        assert holds([result.model_digest], model)
    generates_like(fleet, model)
