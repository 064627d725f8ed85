"""A trainer's publisher, a coordinator, a real vLLM server, and a torch engine that joins it, as processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_steps
import pytest
import rollouts
import torch
from digests import holds
from joining import joined
from loras import lora, merged_says, save
from models import changed, greedy

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(solo: LaunchedFleet, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with joined(solo, EngineSpec("actor-1", str(tiny[1]), engine="torch", options=options)), solo.connect() as fleet:
        yield fleet


def both_generate_like(fleet: Fleet, model: Any, version: common.WeightVersion) -> None:
    """The same greedy tokens, log probabilities within 1e-3, at the same version."""
    prompt = encode("1+2=")
    wanted = greedy(model, prompt, 8)
    logprobs: dict[str, list[float]] = {}
    while len(logprobs) < 2:  # a stage that was just admitted may not be known to the client yet
        response = fleet.generate(prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True, return_logprob=True)
        (sample,) = response.samples
        assert list(sample.output_ids) == wanted
        assert {span.version.label for span in sample.versions} == {version.label}
        logprobs[response.slot] = [entry.logprob for entry in sample.output_logprobs]
    assert logprobs["actor-0"] == pytest.approx(logprobs["actor-1"], abs=1e-3)


def test_one_transaction_updates_both_kinds_of_engine(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    publisher = fleet.publisher("actor", trainer="test")
    try:
        for number in range(2):
            model = changed(tiny[0], seed=number)
            result = publisher.update(model, version=f"step-{number}")
            assert holds([result.model_digest], model)
            stages = result.operation.stage_results
            assert {stage.slot for stage in stages} == {"actor-0", "actor-1"}
            assert {stage.verified for stage in stages} == {common.VERIFICATION_LEVEL_EXPECTED}
            both_generate_like(fleet, model, result.version)
    finally:
        publisher.close()


def test_rollouts_go_on_over_updates_and_stop_their_long_tail(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    rollouts.run_over_updates(fleet, tiny[0])
    rollouts.run_until(fleet)


def test_a_delta_reaches_both_kinds_of_engine_and_what_neither_has_is_refused_before_a_pause(
    fleet: Fleet, tiny: tuple[Any, Path]
) -> None:
    model = changed(tiny[0], seed=20)
    with contextlib.closing(fleet.publisher("actor", trainer="differing")) as publisher:
        publisher.update(model, version="base")
        for number in range(2):  # the second one differs in nothing
            with torch.no_grad():
                model.model.norm.weight.fill_(1.25)
            delta = publisher.update(model, version=f"delta-{number}", base=f"delta-{number - 1}" if number else "base")
            assert delta.tensors_sent == 1 - number
            assert {stage.verified for stage in delta.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
            both_generate_like(fleet, model, delta.version)
        of_the_draft = v.UpdateWeightsFromDiskRequest(
            model_path=str(tiny[1]),
            options=v.UpdateOptions(selector=common.WEIGHT_SELECTOR_DRAFT, pause=common.PAUSE_MODE_ABORT),
        )
        running = fleet.generate_stream(encode("7"), max_new_tokens=400, ignore_eos=True)
        parts = [next(running)]
        for update, field in (
            (lambda: publisher.update(model, version="refused", apply="staged", pause="abort"), "apply"),
            (lambda: fleet.call(of_the_draft, model="actor"), "options.selector"),
        ):
            with pytest.raises(RlctlError) as refused:
                update()
            assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, field)
        parts += running
        assert parts[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH, "nothing was paused"
        (model_status,) = fleet.status().models
        assert model_status.latest == delta.version


def test_a_probe_that_would_end_a_server_is_refused_before_a_pause(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    """vLLM ends on the log probabilities of several prompts with room for adapters on a CPU."""
    with contextlib.closing(fleet.publisher("actor", trainer="probing")) as publisher:
        probe = Probe.of(tiny[0], [encode("1+2=3"), encode("3+4=7")])
        with pytest.raises(RlctlError, match="actor-0 cannot compute the probe: with adapters on a CPU") as refused:
            publisher.update(tiny[0], version="probed", verify="probe", probe=probe)
        assert refused.value.reason is Reason.VERIFICATION_UNREACHABLE
        result = publisher.update(tiny[0], version="again")
        both_generate_like(fleet, tiny[0], result.version)


def test_from_disk(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = changed(tiny[0], seed=4)
    model.save_pretrained(tmp_path / "saved")
    operation = fleet.update_weights_from_disk(str(tmp_path / "saved"), version="disk")
    assert operation.model_digest == rlctl.model_digest(model)
    both_generate_like(fleet, model, operation.weight_version)


def test_pauses_and_what_cannot_be_done(fleet: Fleet) -> None:
    for mode in ("abort", "retract", "in_place", "drain"):
        assert fleet.pause_generation(mode).state == OPERATION_STATE_OK
        assert {stage.state for stage in fleet.status().stages} == {common.STAGE_STATE_PAUSED}
        assert fleet.continue_generation().state == OPERATION_STATE_OK
    with pytest.raises(RlctlError) as refused:
        fleet.call(v.ReleaseMemoryRequest(), slots=["actor-0"])
    assert refused.value.reason is Reason.UNSUPPORTED_BY_ALL
    assert "--enable-sleep-mode" in refused.value.message


def test_a_server_that_is_killed_comes_back_with_weights_that_no_disk_has(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """The stage server starts it again, and the torch engine's weights heal it, without the trainer; so do adapters.

    The pause of an adapter outlasts that.
    """
    model = changed(tiny[0], seed=77)
    publisher = fleet.publisher("actor", trainer="survivor")
    result = publisher.update(model, version="survives")
    publisher.close()
    tensors = lora(tiny[0], 1)
    fleet.load_adapter("math", save(tmp_path / "math", tensors), version="m")
    fleet.pause_generation("abort", adapter="math")
    adapter_steps.come_back_with(fleet, "actor-0", "math")
    after = next(stage for stage in fleet.status().stages if stage.registration.slot == "actor-0")
    assert after.report.weight_version == result.version
    assert holds([after.report.model_digest], model)
    assert [pause.adapter for pause in after.adapter_pauses] == ["math"]
    fleet.continue_generation(adapter="math")
    both_generate_like(fleet, model, result.version)
    said: dict[str, list[int]] = {}
    while len(said) < 2:
        response = fleet.generate(encode("3+"), max_new_tokens=8, temperature=0.0, ignore_eos=True, adapter="math")
        said[response.slot] = list(response.samples[0].output_ids)
    assert said["actor-0"] == said["actor-1"] == merged_says(model, "3+", tensors)
