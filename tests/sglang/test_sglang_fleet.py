"""A trainer's publisher, a coordinator and two real SGLang servers, as processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rollouts
import torch
from answers import of_each
from digests import holds
from heals import check_healed
from interrupted_weights import Interrupted
from models import changed, greedy

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.probe import Probe
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


SLOTS = ("actor-0", "actor-1")

LONG = 250
"""Tokens of a request that an update catches in flight."""


def all_generate_like(fleet: Fleet, model: Any, version: common.WeightVersion) -> None:
    prompt = encode("1+2=")
    expected = greedy(model, prompt, 8)
    for response in of_each(fleet, prompt, max_new_tokens=8, temperature=0.0, ignore_eos=True):
        assert list(response.samples[0].output_ids) == expected
        assert {span.version.label for span in response.samples[0].versions} == {version.label}


def test_the_first_version_is_the_checkpoint(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    (model,) = fleet.status().models
    assert model.latest.sequence == 1
    assert model.model_digest == rlctl.model_digest(tiny[0])
    all_generate_like(fleet, tiny[0], model.latest)


def test_updates_of_a_publisher_are_verified_on_every_server(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    publisher = fleet.publisher("actor", trainer="test", path="broadcast")
    try:
        for number in range(2):
            model = changed(tiny[0], seed=number)
            result = publisher.update(model, version=f"step-{number}")
            assert holds([result.model_digest], model)
            stages = result.operation.stage_results
            assert {stage.verified for stage in stages} == {common.VERIFICATION_LEVEL_EXPECTED}
            all_generate_like(fleet, model, result.version)
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(2)
        delta = publisher.update(model, version="delta", base="step-1")
        assert delta.tensors_sent == 1
        assert {stage.verified for stage in delta.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
        all_generate_like(fleet, model, delta.version)
        made = [o for o in fleet.operations(page_size=200) if o.verb == "InitWeightsUpdateGroup"]
        assert len(made) == 1, "the group of the first update serves the second"
    finally:
        publisher.close()


@pytest.mark.parametrize("verify", ["expected", "probe"])
def test_a_request_in_flight_goes_on_with_the_new_weights(fleet: Fleet, tiny: tuple[Any, Path], verify: str) -> None:
    """At level probe it goes on while the probe is computed already; nobody is told of it before the verdict."""
    publisher = fleet.publisher("actor", trainer="in-flight", path="auto")
    try:
        publisher.update(changed(tiny[0], seed=30), version="before")
        model = changed(tiny[0], seed=31)
        probe = Probe.of(model, [encode("1+2=3")], tolerance=1e-3)
        stream = fleet.generate_stream(encode("5+"), max_new_tokens=LONG, temperature=0.0, ignore_eos=True)
        parts = [next(stream)]
        publisher.update(model, version="after", verify=verify, probe=probe)
        parts += stream
    finally:
        publisher.close()
    tokens = [token for part in parts for token in part.samples[0].output_ids]
    spans = [span for part in parts for span in part.samples[0].versions]
    assert [span.version.label for span in spans] == ["before", "after"]
    kept = spans[0].end
    assert len(tokens) == LONG
    new = tokens[kept : kept + 30]
    assert new == greedy(model, encode("5+") + tokens[:kept], len(new)), "no KV entry of old weights"


def test_rollouts_go_on_over_updates_and_stop_their_long_tail(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    rollouts.run_over_updates(fleet, tiny[0])
    rollouts.run_until(fleet)


def test_from_disk(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    model = changed(tiny[0], seed=4)
    model.save_pretrained(tmp_path / "saved")
    operation = fleet.update_weights_from_disk(str(tmp_path / "saved"), version="disk")
    assert operation.model_digest == rlctl.model_digest(model)
    all_generate_like(fleet, model, operation.weight_version)


def test_the_names_of_sglangs_own_api(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    engine = fleet.engine("actor-1")
    assert engine.get_server_info().engine == "sglang"
    models = [changed(tiny[0], seed=seed) for seed in (50, 51, 52)]
    models[0].save_pretrained(tmp_path / "saved")
    operation = engine.update_weights_from_disk(str(tmp_path / "saved"), weight_version="names", token_step=3)
    all_generate_like(fleet, models[0], operation.weight_version)
    for update, model in (
        (engine.update_weights_from_tensor, models[1]),
        (engine.update_weights_from_distributed, models[2]),
    ):
        result = update(list(model.named_parameters()), weight_version=update.__name__)
        assert {stage.slot for stage in result.operation.stage_results} == set(SLOTS)
        all_generate_like(fleet, model, result.version)
        assert engine.get_model_info().weight_version.label == update.__name__
    sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    fields = {"token_ids_logprob": [3, 15]}
    response = engine.generate(
        input_ids=encode("1+2="), sampling_params=sampling, return_logprob=True, engine_fields=fields
    )
    assert response.slot == "actor-1"
    assert len(response.samples[0].engine_meta["output_token_ids_logprobs"]) == 3
    engine.pause_generation("retract")
    assert {s.registration.slot: s.state for s in fleet.status().stages} == {
        "actor-0": common.STAGE_STATE_READY,
        "actor-1": common.STAGE_STATE_PAUSED,
    }
    engine.flush_cache()
    engine.continue_generation()
    engine.abort_request(abort_all=True)
    with pytest.raises(RlctlError) as refused:
        engine.release_memory_occupation()
    assert refused.value.reason is Reason.UNSUPPORTED_BY_ALL


def test_pauses_and_what_cannot_be_done(fleet: Fleet) -> None:
    for mode in ("abort", "retract", "in_place"):
        assert fleet.pause_generation(mode).state == OPERATION_STATE_OK
        assert {stage.state for stage in fleet.status().stages} == {common.STAGE_STATE_PAUSED}
        assert fleet.continue_generation().state == OPERATION_STATE_OK
    with pytest.raises(RlctlError) as refused:
        fleet.release_memory()
    assert refused.value.reason is Reason.UNSUPPORTED_BY_ALL
    assert "--enable-memory-saver" in refused.value.message
    assert all(stage.routable for stage in fleet.status().stages), "nothing was paused for it"


class Traffic:
    """Requests without an end; of each, when it ended and what its tokens were generated with."""

    def __init__(self, fleet: Fleet) -> None:
        self.served: list[tuple[float, str, set[str]]] = []
        self._fleet = fleet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def since(self, moment: float) -> list[tuple[str, set[str]]]:
        """Stage and versions of the requests that ended after a moment."""
        return [(slot, labels) for ended, slot, labels in self.served if ended > moment]

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            response = self._fleet.generate(encode("1+2="), max_new_tokens=4, temperature=0.0, ignore_eos=True)
            sample = response.samples[0]
            labels = {span.version.label for span in sample.versions}
            assert sum(span.end - span.start for span in sample.versions) == len(sample.output_ids)
            self.served.append((began, response.slot, labels))


def test_a_server_that_is_killed_mid_broadcast_under_a_quorum(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
    first = changed(tiny[0], seed=1)
    publisher.update(first, version="whole")
    model = changed(tiny[0], seed=2)
    (rank,) = fleet.call(v.GetServerInfoRequest(), slots=["actor-1"]).stage_results[0].rank_results
    before = {stage.registration.slot: stage.incarnation for stage in fleet.status().stages}
    weights = Interrupted(model, lambda: os.kill(rank.server_info.pid, signal.SIGKILL))
    with Traffic(fleet) as traffic:
        result = publisher.update(weights, version="without-1", quorum=1, retries=1, deadline_s=120)
        published = time.monotonic()
        assert result.operation.state == OPERATION_STATE_PARTIAL
        outcomes = {stage.slot: stage.outcome for stage in result.operation.stage_results}
        assert outcomes["actor-0"] == common.OUTCOME_APPLIED
        assert outcomes["actor-1"] != common.OUTCOME_APPLIED
        while "actor-0" not in {slot for slot, _ in traffic.since(published)}:
            assert traffic._thread.is_alive()
            time.sleep(0.05)
    assert fleet.status().models[0].latest.label == "without-1"
    assert all(labels == {"without-1"} for _, labels in traffic.since(published))
    stages = {stage.registration.slot: stage for stage in fleet.status().stages}
    assert stages["actor-0"].incarnation == before["actor-0"], "it was not restarted"
    response = fleet.generate(encode("1+2="), max_new_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(response.samples[0].output_ids) == greedy(model, encode("1+2="), 8)
    # Its stage has started it again; a server that has the version heals it, and then it serves that and nothing else.
    with contextlib.closing(fleet.watch()) as events:
        for event in events:
            if any(s.registration.slot == "actor-1" and s.routable for s in event.fleet.stages):
                break
    after = {stage.registration.slot: stage for stage in fleet.status().stages}["actor-1"]
    assert after.incarnation > before["actor-1"]
    assert after.report.weight_version == result.version
    check_healed(fleet, "actor-1", model)
    with Traffic(fleet) as traffic:
        while "actor-1" not in {slot for slot, _ in traffic.since(0.0)}:
            assert traffic._thread.is_alive()
            time.sleep(0.05)
    assert all(labels == {"without-1"} for _, labels in traffic.since(0.0))
    publisher.close()
