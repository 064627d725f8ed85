"""Adapters through real processes: the command line, the publisher over gloo and shared memory, TP 2 and 1."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import of_each
from loras import CONFIG, lora, merged_says, save
from up_helpers import restarted

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

PROMPT = "12+34="


@pytest.fixture(scope="module")
def fleet(torch_fleet: LaunchedFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


def generated(fleet: Fleet, adapter: str) -> list[tuple[list[int], set[str]]]:
    """Tokens and adapter versions, from each stage."""
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, "adapter": adapter}
    samples = [response.samples[0] for response in of_each(fleet, encode(PROMPT), **settings)]
    return [(list(s.output_ids), {span.adapter_version for span in s.versions}) for s in samples]


def rlctl(fleet: LaunchedFleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlctl", "--endpoint", fleet.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_line_loads_lists_generates_and_unloads(
    torch_fleet: LaunchedFleet, fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    tensors = lora(tiny[0], seed=1)
    before = fleet.status().models[0]
    path = save(tmp_path / "adapter", tensors)
    loaded = rlctl(torch_fleet, "adapters", "load", "--name", "math", "--path", path, "--version", "a-1")
    assert loaded.returncode == 0, loaded.stderr
    assert "LoadAdapter OK: 2 of 2 stages confirmed" in loaded.stderr
    assert "math@a-1" in loaded.stderr
    listed = rlctl(torch_fleet, "adapters", "list")
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["ADAPTERS", "math@a-1", "math@a-1"]
    said = rlctl(torch_fleet, "generate", PROMPT, "--adapter", "math", "--temperature", "0", "--max-new-tokens", "2")
    assert said.returncode == 0, said.stderr
    assert "+a-1" in said.stderr
    assert generated(fleet, "math") == [(merged_says(tiny[0], PROMPT, tensors), {"a-1"})] * 2
    assert generated(fleet, "") == [(merged_says(tiny[0], PROMPT, {}), {""})] * 2
    after = fleet.status().models[0]
    assert (after.latest, after.model_digest) == (before.latest, before.model_digest)
    unloaded = rlctl(torch_fleet, "adapters", "unload", "--name", "math")
    assert unloaded.returncode == 0, unloaded.stderr
    unknown = rlctl(torch_fleet, "generate", PROMPT, "--adapter", "math")
    assert unknown.returncode != 0
    assert "ADAPTER_NOT_FOUND" in unknown.stderr


@pytest.mark.parametrize("path", ["broadcast", "ipc"])
def test_the_publisher_updates_an_adapter(fleet: Fleet, tiny: tuple[Any, Path], path: str) -> None:
    before = fleet.status().models[0]
    publisher = fleet.publisher("actor", path=path)
    for number in range(2):
        tensors = lora(tiny[0], seed=10 + number)
        version = f"{path}-{number}"
        result = publisher.update(tensors.items(), version=version, adapter="math", adapter_config=CONFIG)
        assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
        assert [(a.name, a.version) for a in result.operation.adapters] == [("math", version)]
        assert result.version == before.latest, "the base weights stay"
        assert generated(fleet, "math") == [(merged_says(tiny[0], PROMPT, tensors), {version})] * 2
    missing = dict(list(tensors.items())[1:])
    with pytest.raises(RlctlError) as caught:
        publisher.update(missing.items(), version="short", adapter="math", adapter_config=CONFIG)
    assert caught.value.reason is Reason.WEIGHTS_INCOMPLETE, caught.value
    with pytest.raises(RlctlError) as caught:
        publisher.update(tensors.items(), version="dora", adapter="math", adapter_config={**CONFIG, "use_dora": True})
    assert caught.value.reason is Reason.UNSUPPORTED
    assert generated(fleet, "math") == [(merged_says(tiny[0], PROMPT, tensors), {version})] * 2, "as it was"
    assert all(stage.routable for stage in fleet.status().stages)
    publisher.close()


def test_an_adapter_between_leaves_a_delta_its_base(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    model = copy.deepcopy(tiny[0])
    publisher = fleet.publisher("actor")
    publisher.update(model, version="whole")
    publisher.update(lora(model, seed=40).items(), version="between", adapter="math", adapter_config=CONFIG)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    delta = publisher.update(model, version="changed", base="whole")
    assert delta.tensors_sent == 1
    publisher.update(tiny[0], version="as-before")
    publisher.close()
    # One that has sent nothing but an adapter does not know what the base consists of.
    other = fleet.publisher("actor")
    other.update(lora(model, seed=41).items(), version="alone", adapter="math", adapter_config=CONFIG)
    with pytest.raises(RlctlError) as caught:
        other.update(model, version="late", base="as-before")
    assert caught.value.reason is Reason.BASE_MISMATCH
    other.close()
    fleet.unload_adapter("math")


@pytest.mark.parametrize("slot", ["actor-0", "actor-1"])
def test_a_stage_that_comes_back_gets_what_a_trainer_sent_from_another(
    torch_fleet: LaunchedFleet, fleet: Fleet, tiny: tuple[Any, Path], slot: str
) -> None:
    # One has two ranks, the other one: what either sends is gathered to full tensors, and cut again.
    tensors, other = lora(tiny[0], seed=30), lora(tiny[0], seed=31)
    publisher = fleet.publisher("actor")
    for name, given in (("math", tensors), ("code", other)):
        publisher.update(given.items(), version=f"{name}-{slot}", adapter=name, adapter_config=CONFIG)
    publisher.close()
    restarted(torch_fleet, fleet, slot, lambda stage: len(stage.report.adapters) == 2)
    assert generated(fleet, "math") == [(merged_says(tiny[0], PROMPT, tensors), {f"math-{slot}"})] * 2
    assert generated(fleet, "code") == [(merged_says(tiny[0], PROMPT, other), {f"code-{slot}"})] * 2
    for name in ("math", "code"):
        fleet.unload_adapter(name)


def test_a_base_update_keeps_or_drops_what_is_loaded(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    tensors = lora(tiny[0], seed=20)
    publisher = fleet.publisher("actor")
    publisher.update(tensors.items(), version="kept", adapter="math", adapter_config=CONFIG)
    kept = publisher.update(tiny[0], version="base-1")
    assert [adapter.version for adapter in kept.operation.adapters] == ["kept"]
    assert generated(fleet, "math") == [(merged_says(tiny[0], PROMPT, tensors), {"kept"})] * 2
    dropped = publisher.update(tiny[0], version="base-2", adapters="drop")
    assert (list(dropped.operation.adapters), list(dropped.operation.dropped_adapters)) == ([], ["math"])
    with pytest.raises(RlctlError) as caught:
        fleet.generate(encode(PROMPT), adapter="math")
    assert caught.value.reason is Reason.ADAPTER_NOT_FOUND
    publisher.close()
