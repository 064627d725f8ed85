"""Several models that receive weights in one fleet, and one that does not: each with groups and updates of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

SEEDS = {"actor": 50, "critic": 60}


class Waiting:
    """Weights of a model; half way through them it says so, and waits until it may go on."""

    def __init__(self, model: Any) -> None:
        self._source: Any = as_source(model)
        self.half_way = threading.Event()
        self.go_on = threading.Event()

    def metas(self) -> list[TensorMeta]:
        return self._source.metas()

    def local(self) -> Any:
        return self._source.local()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self._source.tensors()):
            if index == len(self.metas()) // 2:
                self.half_way.set()
                assert self.go_on.wait(60)
            yield pair


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[Fleet]:
    engines = [
        EngineSpec("actor-0", str(tiny[1]), model="actor"),
        EngineSpec("critic-0", str(tiny[1]), model="critic"),
        EngineSpec("ref-0", str(tiny[1]), model="ref", frozen=True),
    ]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as local, local.connect() as fleet:
        yield fleet


def held(fleet: Fleet, model: str) -> set[str]:
    operation = fleet.check_weights(model=model)
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def latest(fleet: Fleet) -> dict[str, tuple[str, int]]:
    return {model.name: (model.latest.label, model.latest.sequence) for model in fleet.status().models}


def test_models_are_updated_beside_each_other(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    actor, critic = fleet.publisher("actor"), fleet.publisher("critic")
    weights = Waiting(demo_tiny.make(seed=11))
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(actor.update, weights, version="actor-1")
        try:
            assert weights.half_way.wait(60)
            # While one is in the middle the other one is updated, twice, and served.
            for number in (1, 2):
                result = critic.update(demo_tiny.make(seed=20 + number), version=f"critic-{number}")
                assert result.version.sequence == 1 + number
            states = {stage.registration.slot: stage.state for stage in fleet.status().stages}
            assert states["actor-0"] == common.STAGE_STATE_UPDATING
            assert states["critic-0"] == states["ref-0"] == common.STAGE_STATE_READY
            assert fleet.generate(demo_tiny.encode("1+"), model="critic", max_new_tokens=1).slot == "critic-0"
            assert not updating.done()
            # One of its own kind is refused, and says who is in the way.
            with pytest.raises(RlctlError) as caught:
                fleet.publisher("actor", trainer="another").update(demo_tiny.make(seed=12), version="late")
            assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
        finally:
            weights.go_on.set()
        assert updating.result().version.sequence == 2
    assert holds(held(fleet, "actor"), demo_tiny.make(seed=11))
    assert holds(held(fleet, "critic"), demo_tiny.make(seed=22))
    assert holds(held(fleet, "ref"), tiny[0])
    assert latest(fleet) == {"actor": ("actor-1", 2), "critic": ("critic-2", 3), "ref": ("initial", 1)}
    assert {len(stage.rank_results) for stage in fleet.check_weights().stage_results} == {1}
    groups = {o.targets[0] for o in fleet.operations(verb="InitWeightsUpdateGroup")}
    assert groups == {"actor-0", "critic-0"}
    for publisher in (actor, critic):
        publisher.close()


def test_two_publishers_take_no_notice_of_each_other(fleet: Fleet) -> None:
    before = latest(fleet)
    start = threading.Barrier(2)

    # Made beforehand: all threads draw from torch's one generator.
    models = {name: [demo_tiny.make(seed=seed + number) for number in range(4)] for name, seed in SEEDS.items()}

    def updates(name: str) -> list[str]:
        publisher = fleet.publisher(name)
        start.wait()
        found = [
            publisher.update(model, version=f"{name}-again-{number}").model_digest
            for number, model in enumerate(models[name])
        ]
        publisher.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(SEEDS, pool.map(updates, SEEDS), strict=True))
    for name, digests in found.items():
        assert all(holds([digest], model) for digest, model in zip(digests, models[name], strict=True))
    for name in SEEDS:
        assert latest(fleet)[name] == (f"{name}-again-3", before[name][1] + 4)
        assert held(fleet, name) == {found[name][-1]}
    assert len(fleet.operations(verb="InitWeightsUpdateGroup", page_size=500)) == 4, "two more for two new trainers"


def test_a_model_that_fails_leaves_the_other_alone(fleet: Fleet) -> None:
    before = latest(fleet)
    critic = fleet.publisher("critic")
    weights = Waiting(demo_tiny.make(seed=41))
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(critic.update, weights, version="critic-late")
        try:
            assert weights.half_way.wait(60)
            with pytest.raises(RlctlError) as caught:
                fleet.publisher("actor").update([("model.stranger", torch.zeros(1))], version="never")
            assert "model.stranger" in str(caught.value)
            with pytest.raises(RlctlError) as caught:
                fleet.publisher("ref").update(demo_tiny.make(seed=43), version="never")
            assert caught.value.reason is Reason.MODEL_FROZEN
        finally:
            weights.go_on.set()
        updating.result()
    assert latest(fleet) == before | {"critic": ("critic-late", before["critic"][1] + 1)}
    assert all(stage.routable for stage in fleet.status().stages)
    critic.close()
