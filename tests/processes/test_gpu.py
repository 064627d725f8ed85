"""An engine on a GPU, its trainer on the same one or on another: every path of the weights. Needs a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from digests import holds
from models import changed
from test_torch_fleet import all_generate_like, digests

import rlctl
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.launch.interface.spec import EngineSpec
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.verbs_pb2 import GetServerInfoRequest
from rlctl.weights.tensor.digest import tensor_digests

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible"),
]

DEVICE = "cuda"
KV_TOKENS = 1 << 17


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[Fleet]:
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp()), "max_total_tokens": str(KV_TOKENS)}
    engine = EngineSpec("actor-0", str(tiny[1]), device=DEVICE, options=options)
    directory = tmp_path_factory.mktemp("fleet")
    with LaunchedFleet([engine], directory=directory) as local, local.connect() as fleet:
        yield fleet


@pytest.fixture
def model(tiny: tuple[Any, Path], request: pytest.FixtureRequest) -> Any:
    """Other weights for every test, on the host."""
    return changed(tiny[0], seed=sum(request.node.name.encode()))


def check_serves(fleet: Fleet, model: Any, result: rlctl.UpdateResult) -> None:
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert digests(fleet) == {result.model_digest} == {rlctl.model_digest(model, like=result.model_digest)}
    all_generate_like(fleet, model.cpu())


def test_a_keyed_digest_is_the_same_on_a_gpu(model: Any) -> None:
    key = bytes(range(16))
    named = dict(model.named_parameters()) | {
        "large": torch.randn(300, 9000, dtype=torch.bfloat16),
        "row": torch.ones(3),
    }
    on_cpu = tensor_digests({name: (tensor, tensor.dtype) for name, tensor in named.items()}, key=key)
    there = {name: (tensor.detach().to(DEVICE), tensor.dtype) for name, tensor in named.items()}
    assert tensor_digests(there, key=key) == on_cpu


def test_an_update_is_verified_by_a_keyed_digest_on_the_gpu(fleet: Fleet, model: Any) -> None:
    publisher = fleet.publisher("actor", path="ipc")
    result = publisher.update(model.to(DEVICE), version="keyed", digest="keyed")
    assert result.model_digest == rlctl.model_digest(model, like=result.model_digest)
    assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    publisher.close()


def test_what_has_never_run_on_a_gpu_is_called_experimental(fleet: Fleet) -> None:
    found = fleet.status().stages[0].registration.capabilities
    assert list(found.experimental) == ["transport.torch_nccl"]
    assert {common.TRANSPORT_TORCH_NCCL, common.TRANSPORT_CUDA_IPC} <= set(found.transports)


def test_it_generates_what_the_model_says(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    all_generate_like(fleet, tiny[0])


@pytest.mark.parametrize("apply", ["in_place", "staged"])
def test_from_the_trainers_gpu_memory_by_handle(fleet: Fleet, model: Any, apply: str) -> None:
    publisher = fleet.publisher("actor", path="ipc")
    model = model.to(DEVICE)
    for scale in (1.0, 0.5):
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        result = publisher.update(model, version=f"ipc-{apply}-{scale}", apply=apply)
        segments = publisher.aio._part._segments
        assert segments is not None
        assert segments.pool.device.type == DEVICE
        check_serves(fleet, model, result)
        model = model.to(DEVICE)
    assert segments.pool.allocations == 1
    publisher.close()


def test_what_a_stream_is_still_computing_is_waited_for(fleet: Fleet, model: Any) -> None:
    publisher = fleet.publisher("actor", path="ipc")
    model = model.to(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        model.lm_head.weight.mul_(0.5)
        pending = publisher.update_async(model, version="computed")
        pending.wait_sent()
        sent = copy.deepcopy(model)
        model.lm_head.weight.zero_()
    assert holds([pending.wait().model_digest], sent)
    assert holds(digests(fleet), sent)
    publisher.close()


@pytest.mark.parametrize("place", ["cpu", DEVICE])
def test_over_a_gloo_group(fleet: Fleet, model: Any, place: str) -> None:
    publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
    result = publisher.update(model.to(place), version=f"gloo-{place}")
    check_serves(fleet, model, result)
    publisher.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes each member of a group on a GPU of its own")
@pytest.mark.parametrize("apply", ["in_place", "staged"])
def test_over_an_nccl_group(fleet: Fleet, model: Any, apply: str) -> None:
    # The fleet has taken the first GPU.
    with torch.cuda.device(torch.cuda.device_count() - 1):
        publisher = fleet.publisher("actor", backend="nccl", bucket_bytes=16 << 10)
        for number in range(2):
            result = publisher.update(model.to("cuda"), version=f"nccl-{apply}-{number}", apply=apply)
        check_serves(fleet, model, result)
        publisher.close()


@pytest.mark.parametrize("apply", ["in_place", "staged"])
def test_from_disk_through_pinned_buffers(fleet: Fleet, model: Any, tmp_path: Path, apply: str) -> None:
    demo_tiny.save(model, tmp_path / "checkpoint")
    publisher = fleet.publisher("actor")
    result = publisher.update(model, version=f"disk-{apply}", checkpoint=str(tmp_path / "checkpoint"), apply=apply)
    check_serves(fleet, model, result)
    publisher.close()


def test_memory_is_given_back_and_comes_again(fleet: Fleet, model: Any) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    publisher = fleet.publisher("actor", path="ipc")
    fleet.pause_generation("retract")
    before = free()
    operation = fleet.release_memory()
    ((released,),) = [stage.rank_results for stage in operation.stage_results]
    assert free() - before > 0.75 * released.memory.bytes
    fleet.resume_memory(["weights"])
    result = publisher.update(model.to(DEVICE), version="woken", after="stay_paused")
    fleet.resume_memory()
    fleet.continue_generation()
    check_serves(fleet, model, result)
    publisher.close()


def test_the_ranks_name_their_gpu(fleet: Fleet) -> None:
    (worker,) = fleet.status().stages[0].registration.layout.workers
    assert worker.device == str(torch.cuda.get_device_properties(0).uuid)
    ((rank,),) = [stage.rank_results for stage in fleet.call(GetServerInfoRequest()).stage_results]
    assert rank.server_info.settings["device"].startswith("cuda")
