"""An engine of a fleet, driven under the names of SGLang's Python API."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digests import holds

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


def states(fleet: Fleet) -> dict[str, str]:
    stages = fleet.status().stages
    return {s.registration.slot: common.StageState.Name(s.state).removeprefix("STAGE_STATE_") for s in stages}


def test_one_engine_is_paused_asleep_and_awake(fleet: Fleet) -> None:
    engine = fleet.engine("actor-1")
    engine.pause_generation("retract")
    assert states(fleet) == {"actor-0": "READY", "actor-1": "PAUSED"}
    engine.flush_cache()
    engine.release_memory_occupation(["kv_cache"])
    assert states(fleet) == {"actor-0": "READY", "actor-1": "ASLEEP"}
    engine.resume_memory_occupation()
    engine.continue_generation()
    assert states(fleet) == {"actor-0": "READY", "actor-1": "READY"}
    engine.abort_request(abort_all=True)
    with pytest.raises(RlctlError) as refused:
        fleet.engine("none")
    assert refused.value.reason is Reason.STAGE_NOT_FOUND


def test_it_generates_and_says_what_it_is(fleet: Fleet) -> None:
    for slot in ("actor-0", "actor-1"):
        engine = fleet.engine(slot)
        sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        response = engine.generate(input_ids=encode("1+2="), sampling_params=sampling, return_logprob=True)
        assert response.slot == slot
        assert len(response.samples[0].output_logprobs) == 3
        assert engine.get_model_info().model_type == "llama"
        assert engine.get_server_info().engine == "torch"
    with pytest.raises(RlctlError) as refused:
        engine.generate()
    assert refused.value.reason is Reason.FIELD_REQUIRED
    with pytest.raises(RlctlError) as both:
        engine.generate("1", input_ids=[1])
    assert both.value.reason is Reason.FIELD_CONFLICT


def test_weights_reach_every_engine_of_the_model(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    engine = fleet.engine("actor-1")
    models = [demo_tiny.make(seed=seed) for seed in range(3)]
    models[0].save_pretrained(tmp_path / "saved")
    operation = engine.update_weights_from_disk(str(tmp_path / "saved"), weight_version="disk", keep_pause=True)
    assert operation.model_digest == rlctl.model_digest(models[0])
    assert states(fleet) == {"actor-0": "PAUSED", "actor-1": "PAUSED"}
    fleet.continue_generation()
    for update, model in (
        (engine.update_weights_from_tensor, models[1]),
        (engine.update_weights_from_distributed, models[2]),
    ):
        result = update(list(model.named_parameters()), weight_version=update.__name__)
        assert holds([result.model_digest], model)
        assert {stage.slot for stage in result.operation.stage_results} == {"actor-0", "actor-1"}
        with pytest.raises(RlctlError) as refused:
            update([], load_format="direct", weight_version="never")
        assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "load_format")
    assert engine.get_model_info().weight_version.label == "update_weights_from_distributed"
    for slot in ("actor-0", "actor-1"):
        for name, tensor in models[2].state_dict().items():
            assert fleet.engine(slot).get_weights_by_name(name, 2) == tensor[:2].tolist(), name


def test_weights_are_given_as_to_sglang_without_a_label(fleet: Fleet) -> None:
    engine, model = fleet.engine("actor-1"), demo_tiny.make(seed=4)
    labels = set()
    for update in (engine.update_weights_from_tensor, engine.update_weights_from_distributed):
        result = update(list(model.named_parameters()), None, True)
        assert holds([result.model_digest], model)
        labels.add(result.version.label)
    assert len(labels) == 2
    with pytest.raises(RlctlError) as refused:
        engine.update_weights_from_distributed(["model.norm.weight"], ["float32"], [[16]])
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "named_tensors")


def test_a_group_without_anybody_in_it_is_refused(fleet: Fleet) -> None:
    engine = fleet.engine("actor-1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(OperationFailed) as failed:
            engine.init_weights_update_group("127.0.0.1", nobody.getsockname()[1], 1, 2, "own", "gloo")
    (stage,) = failed.value.operation.stage_results
    assert stage.rank_results[0].error.reason == Reason.UNREACHABLE.name
    with pytest.raises(OperationFailed) as unknown:
        engine.destroy_weights_update_group("own")
    (stage,) = unknown.value.operation.stage_results
    assert stage.rank_results[0].error.reason == Reason.GROUP_NOT_FOUND.name


def test_adapters(fleet: Fleet, tmp_path: Path) -> None:
    engine = fleet.engine("actor-0")
    with pytest.raises(RlctlError):
        engine.load_lora_adapter("a", str(tmp_path / "none"))
    with pytest.raises(RlctlError) as unknown:
        engine.unload_lora_adapter("a")
    assert unknown.value.reason is Reason.ADAPTER_NOT_FOUND
