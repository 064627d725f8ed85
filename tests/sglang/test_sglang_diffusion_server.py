"""A real SGLang-Diffusion under its plug-in, on a CPU: a tiny Flux, by SGLang's own code and by diffusers'."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusion_server import DiffusionServer, derived, make, packages, serving, weights_of
from rlctl_sglang.diffusion.engine import DiffusionEngine
from rlctl_sglang.diffusion.modules import Pipelines
from safetensors.torch import load_file, save_file
from server_stage import Driver
from up_helpers import when

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.sdk.blocking import connect
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.weights.tensor.digest import ModelDigest

pytestmark = pytest.mark.timeout(300)

ENCODERS = {"text_encoder", "text_encoder_2"}
PICTURE = {"prompt": "a cat", "size": "64x64", "n": 1, "response_format": "b64_json"}


@dataclass
class Checkpoints:
    """The one that servers are started with; one with another transformer and VAE; one with other encoders too; one
    that ends a load half-way.
    """

    first: Path
    second: Path
    encoders: Path
    broken: Path


@pytest.fixture(scope="module")
def checkpoints(sglang: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    packages()
    place = tmp_path_factory.mktemp("diffusion")
    first = place / "first"
    first.mkdir()
    make(sglang, first)
    second = derived(first, place / "second", ["transformer", "vae"])
    broken = Path(shutil.copytree(second, place / "broken"))
    file = weights_of(broken, "vae")
    tensors = load_file(file)
    last = sorted(tensors)[-1]
    save_file({**tensors, last: torch.zeros(7, dtype=torch.bfloat16)}, file)
    return Checkpoints(first, second, derived(first, place / "encoders", sorted({"vae", *ENCODERS})), broken)


@pytest.fixture(scope="module")
def native(
    sglang: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiffusionServer]:
    """By SGLang's own code for Flux."""
    with serving(sglang, checkpoints.first, tmp_path_factory.mktemp("native"), "--model-id", "FLUX.1-dev") as server:
        yield server


@pytest.fixture(scope="module")
def by_diffusers(
    sglang: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiffusionServer]:
    """By diffusers' code, inside of it."""
    place = tmp_path_factory.mktemp("by-diffusers")
    with serving(sglang, checkpoints.first, place, "--backend", "diffusers") as server:
        yield server


@contextmanager
def attached(server: DiffusionServer, checkpoints: Checkpoints, **options: str) -> Iterator[Driver]:
    """The plug-in before a server that is brought back to the first checkpoint."""
    given = {"url": server.url, "reload": "true", **options}
    driver = Driver(DiffusionEngine, checkpoints.first, options=given)
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


def digest_of(checkpoint: Path, modules: set[str]) -> str:
    digest = ModelDigest()
    for module in modules:
        for name, tensor in load_file(weights_of(checkpoint, module)).items():
            digest.add(f"{module}.{name}", tensor)
    return digest.digest()


def refused(call: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as raised:
        call()
    return raised.value


def load(driver: Driver, checkpoint: Path, *modules: str, update: str = "u", **fields: object) -> None:
    kind = v.UPDATE_KIND_PARTIAL if modules else v.UPDATE_KIND_FULL
    driver.tell(v.PrepareUpdateRequest(kind=kind), update_id=update)
    request = v.UpdateWeightsFromDiskRequest(model_path=str(checkpoint), target_modules=modules, **fields)  # type: ignore[arg-type]
    driver.tell(request, update_id=update)


def sums(server: DiffusionServer) -> Mapping[str, str]:
    told: dict[str, str] = server.ask("/get_weights_checksum", {})
    return told


def test_what_it_says_about_itself(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    with attached(native, checkpoints) as driver:
        info = driver.info
        # SGLang renames what is in the text encoders: nobody can say from their files what it should hold.
        assert info.model_digest == digest_of(checkpoints.first, {"transformer", "vae"})
        assert not info.fenced
        assert list(info.capabilities.transports) == [common.TRANSPORT_DISK]
        assert common.VERIFICATION_LEVEL_EXPECTED in info.capabilities.verification
        assert common.PAUSE_MODE_IN_PLACE not in info.capabilities.pause_modes
        for verb in ("UpdateWeightsFromTensor", "InitWeightsUpdateGroup", "LoadAdapter", "AbortRequests", "GetLoads"):
            assert info.capabilities.unsupported[verb]
        model = driver.tell(v.GetModelInfoRequest(reference=True))
        assert (model.model_type, list(model.architectures)) == ("diffusion", ["FluxPipeline"])
        assert {tensor.name.partition(".")[0] for tensor in model.reference} == {"transformer", "vae"}
        assert driver.tell(v.GetServerInfoRequest()).engine_version.startswith("0.5.")
        error = refused(lambda: driver.generate(rollout.GenerateRequest(text="a cat")))
        assert (error.reason, "/v1/images/generations" in error.next_step) == (Reason.UNSUPPORTED, True)


def test_a_checkpoint_is_loaded_and_what_is_held_is_that(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    with attached(native, checkpoints) as driver:
        before = sums(native)
        wanted = digest_of(checkpoints.second, {"transformer", "vae"})
        found = driver.tell(v.InspectCheckpointRequest(model_path=str(checkpoints.second)))
        assert (found.model_digest, found.left) == (wanted, 0)
        load(driver, checkpoints.second, expected_digest=wanted)
        driver.commit("u", "two", 2)
        assert driver.tell(v.FlushCacheRequest(), update_id="u").tiers
        report = driver.tell(v.CheckWeightsRequest(per_tensor=True))
        assert (report.model_digest, len(report.model_tensors)) == (wanted, found.tensors)
        after = sums(native)
        assert {name for name in after if after[name] != before[name]} == {"transformer", "vae"}
        assert "b64_json" in native.ask("/v1/images/generations", {**PICTURE, "num_inference_steps": 1})["data"][0]
        # Somebody else changes what it holds, also where rlctl never loads anything: it is not what was confirmed.
        for place, back, module in (
            (checkpoints.encoders, checkpoints.first, "text_encoder_2"),
            (checkpoints.first, checkpoints.second, "vae"),
        ):
            native.ask("/update_weights_from_disk", {"model_path": str(place), "target_modules": [module]})
            error = refused(lambda: driver.tell(v.CheckWeightsRequest()))
            assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, common.OUTCOME_DIRTY)
            assert error.metadata["modules"] == module
            native.ask("/update_weights_from_disk", {"model_path": str(back), "target_modules": [module]})
            assert driver.tell(v.CheckWeightsRequest()).model_digest == wanted


def test_modules_by_name(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    with attached(native, checkpoints) as driver:
        vae = digest_of(checkpoints.first, {"vae"})
        load(driver, checkpoints.second, "transformer")
        driver.commit("u", "two", 2)
        report = driver.tell(v.CheckWeightsRequest(per_tensor=True))
        tensors = {tensor.name: tensor.sha256 for tensor in report.model_tensors}
        held = ModelDigest()
        for name, sha256 in tensors.items():
            if name.startswith("vae."):
                held.add_digest(name, sha256)
        assert held.digest() == vae
        assert (
            report.model_digest
            == driver.tell(
                v.InspectCheckpointRequest(model_path=str(checkpoints.second), target_modules=["transformer"])
            ).model_digest
        )
        before = sums(native)
        for module in ("text_encoder", "unet"):
            error = refused(lambda module=module: load(driver, checkpoints.second, module))  # type: ignore[misc]
            assert (error.reason, error.field) == (Reason.UNSUPPORTED, "target_modules[0]")
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        assert sums(native) == before


def test_what_does_not_fit_is_refused_before_anything_is_sent(
    native: DiffusionServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    with attached(native, checkpoints, allowed_roots=f"{tmp_path}:{checkpoints.first.parent}") as driver:
        before = sums(native)
        wide = Path(shutil.copytree(checkpoints.second, tmp_path / "wide"))
        save_file({n: t.float() for n, t in load_file(weights_of(wide, "vae")).items()}, weights_of(wide, "vae"))
        missing = Path(shutil.copytree(checkpoints.second, tmp_path / "missing"))
        shutil.rmtree(missing / "transformer")
        doubtful = Path(shutil.copytree(checkpoints.second, tmp_path / "doubtful"))
        shutil.copy(weights_of(doubtful, "vae"), doubtful / "vae" / "diffusion_pytorch_model.fp16.safetensors")
        reasons = {
            wide: Reason.CHECKPOINT_MISMATCH,
            missing: Reason.CHECKPOINT_NOT_FOUND,
            doubtful: Reason.CHECKPOINT_MISMATCH,
            checkpoints.broken: Reason.CHECKPOINT_MISMATCH,
            checkpoints.encoders: Reason.CHECKPOINT_MISMATCH,
            Path("/"): Reason.PATH_NOT_ALLOWED,
        }
        for place, reason in reasons.items():
            error = refused(lambda place=place: load(driver, place))  # type: ignore[misc]
            assert (error.reason, error.outcome) == (reason, common.OUTCOME_REJECTED), place
        assert sums(native) == before


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("native", common.OUTCOME_REJECTED),
        pytest.param("by_diffusers", common.OUTCOME_DIRTY, marks=pytest.mark.long),
    ],
)
def test_a_load_that_ended_half_way_is_judged_by_what_is_held_and_not_by_what_is_said(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, kind: str, outcome: int
) -> None:
    """Both say that all modules were rolled back."""
    server = request.getfixturevalue(kind)
    monkeypatch.setattr(Pipelines, "_compare", lambda *_: None)
    with attached(server, checkpoints) as driver:
        before = sums(server)
        error = refused(lambda: load(driver, checkpoints.broken))
        assert (error.reason, "rolled back" in error.message) == (Reason.ENGINE_FAILED, True)
        assert (sums(server) == before) == (error.outcome == common.OUTCOME_REJECTED)
        assert error.outcome == outcome


@pytest.mark.long
def test_by_diffusers_all_modules_can_be_compared(by_diffusers: DiffusionServer, checkpoints: Checkpoints) -> None:
    with attached(by_diffusers, checkpoints) as driver:
        modules = {"transformer", "vae", *ENCODERS}
        assert driver.info.model_digest == digest_of(checkpoints.first, modules)
        load(driver, checkpoints.encoders)
        driver.commit("u", "two", 2)
        assert driver.tell(v.CheckWeightsRequest()).model_digest == digest_of(checkpoints.encoders, modules)


def test_what_was_updated_is_attached_to_again_only_when_it_may_be_brought_back(
    native: DiffusionServer, checkpoints: Checkpoints
) -> None:
    native.ask("/update_weights_from_disk", {"model_path": str(checkpoints.second), "target_modules": ["transformer"]})
    with pytest.raises(RlctlError) as raised, attached(native, checkpoints, reload="false"):
        pass
    assert (raised.value.reason, "reload=true" in raised.value.next_step) == (Reason.CHECKPOINT_MISMATCH, True)
    with attached(native, checkpoints) as driver:
        assert driver.info.model_digest == digest_of(checkpoints.first, {"transformer", "vae"})


def test_an_update_waits_for_the_request_that_runs(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    with attached(native, checkpoints) as driver:
        done: list[float] = []

        def draw() -> None:
            native.ask("/v1/images/generations", {**PICTURE, "num_inference_steps": 400}, 120)
            done.append(time.monotonic())

        drawing = threading.Thread(target=draw)
        drawing.start()
        error = None
        while error is None:
            assert drawing.is_alive()
            try:
                driver.tell(v.PrepareUpdateRequest(), update_id="u")
                driver.tell(v.AbortUpdateRequest(), update_id="u")  # it has not begun
            except RlctlError as refusal:
                error = refusal
        assert (error.reason, not done) == (Reason.ACTIVE_REQUESTS, True)
        for mode in (common.PAUSE_MODE_IN_PLACE, common.PAUSE_MODE_ABORT):
            error = refused(lambda mode=mode: driver.tell(v.PauseGenerationRequest(mode=mode)))  # type: ignore[misc]
            assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
        driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN))
        drained = time.monotonic()
        drawing.join(60)
        assert done[0] < drained + 1
        driver.tell(v.PrepareUpdateRequest(), update_id="u")
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        driver.tell(v.ContinueGenerationRequest())


def test_memory_that_it_cannot_release_is_not_released(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    """It moves modules out of a GPU's memory, and there is none."""
    with attached(native, checkpoints) as driver:
        error = refused(lambda: driver.tell(v.ReleaseMemoryRequest()))
        assert (error.reason, error.outcome) == (Reason.MEMORY_NOT_RELEASABLE, common.OUTCOME_REJECTED)
        assert not driver.tell(v.ResumeMemoryRequest()).released
        load(driver, checkpoints.first)
        driver.commit("u", "two", 2)


def test_a_fleet_of_it_is_updated(native: DiffusionServer, checkpoints: Checkpoints) -> None:
    with rlctl.embedded([native.url], options={"reload": "true"}) as fleet:
        operation = fleet.update_weights_from_disk(
            str(checkpoints.second), version="two", options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
        )
        assert operation.state == OPERATION_STATE_OK
        (result,) = operation.stage_results
        assert (result.verified, result.state) == (common.VERIFICATION_LEVEL_EXPECTED, common.STAGE_STATE_READY)
        assert operation.model_digest == digest_of(checkpoints.second, {"transformer", "vae"})
        frozen = v.UpdateOptions(pause=common.PAUSE_MODE_IN_PLACE)
        error = refused(lambda: fleet.update_weights_from_disk(str(checkpoints.first), options=frozen))
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.pause")
        digest = ModelDigest()
        for place, module in ((checkpoints.first, "transformer"), (checkpoints.second, "vae")):
            for name, tensor in load_file(weights_of(place, module)).items():
                digest.add(f"{module}.{name}", tensor)
        operation = fleet.update_weights_from_disk(
            str(checkpoints.first), target_modules=["transformer"], expected_digest=digest.digest()
        )
        assert operation.state == OPERATION_STATE_OK
        assert operation.stage_results[0].verified == common.VERIFICATION_LEVEL_EXPECTED
        assert operation.model_digest == digest.digest()


@pytest.mark.long
def test_a_server_that_was_started_again_is_a_new_incarnation_and_is_healed(
    native: DiffusionServer, checkpoints: Checkpoints
) -> None:
    plain = [sys.executable, "-m", "rlctl"]
    with contextlib.ExitStack() as ending:

        def run(*arguments: str) -> dict[str, str]:
            child = subprocess.Popen([*plain, *arguments], stdout=subprocess.PIPE, text=True)
            ending.callback(child.wait, 30)
            ending.callback(child.terminate)
            assert child.stdout is not None
            ending.callback(child.stdout.close)
            said: dict[str, str] = json.loads(child.stdout.readline())
            return said

        journal = str(native.log.with_name("journal.db"))
        coordinator = run("coordinator", "--listen", "127.0.0.1:0", "--journal", journal)["address"]
        options = ["--option", f"url={native.url}", "--option", "reload=true"]
        stage = ["--slot", "actor-0", "--engine", "sglang-diffusion", "--model-path", str(checkpoints.first)]
        run("stage", *stage, *options, "--coordinator", coordinator)
        fleet = ending.enter_context(connect(coordinator))
        when(fleet, lambda known: "actor-0" in known and not known["actor-0"].not_routable)
        fleet.update_weights_from_disk(str(checkpoints.second), version="two")
        held = sums(native)
        native.stop()
        native.start()
        native.wait()
        assert sums(native) != held
        deadline = time.monotonic() + 150
        while not any(stage.incarnation == 2 and not stage.not_routable for stage in fleet.status().stages):
            assert time.monotonic() < deadline
            time.sleep(1)
        assert sums(native) == held


def test_it_is_noticed_that_the_process_is_gone_that_does_the_work(
    native: DiffusionServer, checkpoints: Checkpoints
) -> None:
    """Its front goes on answering. The last test: the server is of no use then."""
    with attached(native, checkpoints) as driver:
        native.kill_scheduler()
        deadline = time.monotonic() + 60
        while not driver.failures:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert driver.failures[0].reason is Reason.ENGINE_FAILED
        assert refused(lambda: driver.tell(v.CheckWeightsRequest())).reason is Reason.ENGINE_FAILED
