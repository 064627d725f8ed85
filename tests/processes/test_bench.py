"""The benchmark harness runs from end to end and prints what it promises. What it measures is for people to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tools.benchmark import served

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

IDS = {
    "broadcast_tp1",
    "broadcast_tp2",
    "broadcast_verified",
    "broadcast_keyed",
    "small_tensors",
    "control_share",
    "decode_check_share",
    "control_null_bucket",
    "control_null_rest",
    "second_update_groups",
    "trainer_stall",
    "tensor",
    "tensor_copy",
    "disk",
    "checksum",
    "checksum_keyed",
    "extra_memory_in_place",
    "staged_swap",
    "staged_fleet_pause",
    "extra_memory_staged",
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.benchmark", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_quick_run_of_the_weights_benchmark_measures_its_figures() -> None:
    done = bench("weights", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["name"] == "weights"
    assert {"cores", "memory_gib", "load_1m", "torch", "date"} <= document["machine"].keys()
    figures = {figure["id"]: figure for figure in document["figures"]}
    assert figures.keys() == IDS
    for figure in figures.values():
        assert {"value", "unit", "floor", "goal", "met"} <= figure.keys()
        assert isinstance(figure["value"], (int, float))
        low, high = figure["spread"]
        assert low <= high
        assert figure["met"] is True or figure["goal"] is not None
    # Not a matter of speed: the groups of the first update serve all later ones.
    assert figures["second_update_groups"]["value"] == 0
    assert figures["second_update_groups"]["details"]["first_update_groups"] == 1
    assert figures["small_tensors"]["details"]["tensors"] == 500


FIGURES = {
    "fanout": {
        "vs_streams_64",
        "vs_streams_256",
        "vs_streams_1024",
        "vs_http_256",
        "vs_http_1024",
        "growth",
        "tp8",
    },
    "recovery": {"first_op", "all_reconciled"},
}


@pytest.mark.parametrize("name", [pytest.param("fanout", marks=pytest.mark.long), "recovery"])
def test_a_quick_run_measures_every_figure(name: str) -> None:
    done = bench(name, "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures.keys() == FIGURES[name]
    for figure in figures.values():
        assert figure["goal"] is not None
        assert 0 < figure["spread"][0] <= figure["value"] <= figure["spread"][1]
    if name == "recovery":
        assert figures["first_op"]["value"] <= figures["all_reconciled"]["value"]
        assert figures["first_op"]["details"]["stages"] == 32


def test_a_quick_run_of_the_sidecars_benchmark() -> None:
    done = bench("sidecar", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures.keys() == {"added_p50_c1", "cpu_c64"}
    assert all(figure["value"] > 0 for figure in figures.values())
    assert figures["added_p50_c1"]["floor"] > 0


def test_a_quick_run_of_the_data_ports_benchmark() -> None:
    done = bench("data_port", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    names = {"added_p50_c1", "gateway_added_p50_c1", "cpu_c64", "memory_requests", "memory_refused"}
    assert figures.keys() == names
    for name, goal in (("added_p50_c1", 0.5), ("gateway_added_p50_c1", 1.2)):
        assert figures[name]["goal"] == goal
        assert figures[name]["floor"] > 0
    assert figures["cpu_c64"]["value"] > 0


@pytest.mark.long
@pytest.mark.skipif(bool(served.lacking()), reason="vLLM is not installed")
def test_a_quick_run_of_the_benchmark_with_a_real_vllm() -> None:
    done = bench("served", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures.keys() == {"port_rps_c64", "gateway_rps_c64"}
    assert all(figure["floor"] > 0 and figure["details"]["through_requests_per_s"] > 0 for figure in figures.values())


@pytest.mark.long
def test_a_quick_run_of_the_rollouts_benchmark() -> None:
    done = bench("rollout", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures.keys() == {
        *("sdk_added", "sdk_rps_c1", "sdk_rps", "stream_rps", "gateway_rps", "torch_rps_c1", "torch_rps"),
        *("stale_tokens", "admin_under_load"),
    }
    assert all(figures[name]["value"] > 0 for name in figures.keys() - {"sdk_added", "stale_tokens"})
    # Not a matter of speed.
    assert figures["stale_tokens"]["value"] == 0
    assert figures["stale_tokens"]["details"]["failed_requests"] == 0
    assert figures["stale_tokens"]["details"]["tokens"] >= 3200
    assert figures["admin_under_load"]["details"]["running"] == figures["admin_under_load"]["details"]["streams"] == 200


@pytest.mark.parametrize("arguments", [["nothing"], ["weights", "--only", "nothing"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert "nothing" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is visible")
def test_a_quick_run_of_the_gpus_benchmark() -> None:
    done = bench("gpu", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    figures = {figure["id"]: figure for figure in json.loads(done.stdout)["figures"]}
    assert figures.keys() == {"ipc", "ipc_stall", "staged_pause", "verified", "gloo", "disk", "checksum"}
    assert all(figure["value"] > 0 for figure in figures.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_without_a_gpu_its_benchmark_is_refused() -> None:
    done = bench("gpu")
    assert done.returncode == 2
    assert "no GPU is visible" in done.stderr
