"""Trainers' own HTTP clients as the package registry has them, unmodified, against a gateway of their dialect."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from client_runs import INTEGRATIONS, ROOT, TEMPLATE, TRL, fetched, run, skyrl_generates, skyrl_updates, trl_generates

from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

sys.path.insert(0, str(INTEGRATIONS))

from tiny_trainer import free_port  # noqa: E402


@pytest.mark.parametrize("colocated", [False, True])
async def test_skyrls_client(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], colocated: bool
) -> None:
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tiny[1])) as http:
        url = f"http://{http._base_url.authority}"
        await skyrl_updates(url, torch_fleet.address, tiny[1], *(["--colocated"] if colocated else []))


@pytest.fixture
def chats(tiny: tuple[Any, Path], tmp_path: Path) -> str:
    """Directory of the tiny model's tokenizer with a chat template."""
    shutil.copytree(tiny[1], tmp_path / "chats", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = tmp_path / "chats" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    return str(tmp_path / "chats")


async def test_skyrls_client_generates(torch_fleet: LaunchedFleet, open_gateway: Any, chats: str) -> None:
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=chats) as http:
        await skyrl_generates(f"http://{http._base_url.authority}")


async def test_trls_client_generates(torch_fleet: LaunchedFleet, open_gateway: Any, chats: str) -> None:
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=chats) as http:
        await trl_generates(f"http://{http._base_url.authority}", world_size=3)


@pytest.mark.parametrize("stateful", [False, True])
async def test_trls_client_updates(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], client: AsyncFleet, stateful: bool
) -> None:
    """A whole model, tensor by tensor, and half of one: TRL calls ``finish_weight_update`` after an error, too."""
    clients = fetched("trl==1.16.0")
    async with open_gateway(torch_fleet.address, "vllm") as http:
        url = f"http://{http._base_url.authority}"
        whole, tensors, half, after = await run(
            *(sys.executable, TRL, url, str(free_port()), str(tiny[1]), *(["--stateful"] if stateful else [])),
            clients=f"{clients}{os.pathsep}{ROOT}",
        )
    assert len({whole["digest"], tensors["digest"], after["digest"]}) == 3
    assert "WEIGHTS_INCOMPLETE" in half["error"]
    results = (await client.check_weights()).stage_results
    assert {rank.check.model_digest for result in results for rank in result.rank_results} == {after["digest"]}
    newest = await client.operations(verb="WeightUpdate", page_size=4)
    failed = OPERATION_STATE_FAILED
    assert [each.state for each in newest] == [OPERATION_STATE_OK, failed, OPERATION_STATE_OK, OPERATION_STATE_OK]


@pytest.mark.parametrize("stateful", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_vllms_example(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], stateful: bool
) -> None:
    """By OpenAI's own client, and the requests that vLLM's trainer example makes."""
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tiny[1])) as http:
        steps = await run(
            *(sys.executable, str(INTEGRATIONS / "vllm-trainer" / "update.py"), f"--model={tiny[1]}"),
            *(f"--url=http://{http._base_url.authority}", f"--coordinator={torch_fleet.address}"),
            *(["--stateful"] if stateful else []),
            clients=ROOT,
        )
    assert len({step["model_digest"] for step in steps}) == 2
    assert all(len(step["texts"]) == 2 for step in steps)


@pytest.mark.timeout(300)
async def test_verls_trainer_side(torch_fleet: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    """verl 0.9.1 under its patch: FSDP workers that train, its checkpoint manager, its client of agent loops."""
    client, imports, scripts = fetched("verl==0.9.1"), fetched("verl-imports"), INTEGRATIONS / "verl"
    shutil.copytree(client / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    await apply_patch(scripts / "verl-0.9.1.patch", directory=tmp_path)
    steps = await run(
        *(sys.executable, str(scripts / "trainer.py"), f"--model={tiny[1]}", f"--coordinator={torch_fleet.address}"),
        clients=f"{tmp_path}{os.pathsep}{imports}{os.pathsep}{scripts}",
        VERL_USE_EXTERNAL_MODULES="on_cpu",
        VERL_ENGINE_DEVICE="cuda",
        RAY_USAGE_STATS_ENABLED="0",
    )
    assert len({step["model_digest"] for step in steps}) == 2
    assert [(step["tokens"], step["steps"]) for step in steps] == [([16] * 4, [0] * 4), ([16] * 4, [1] * 4)]
    assert all("checkpoint_engine/pause_s" in step["metrics"] for step in steps)


PATCHES = sorted(INTEGRATIONS.glob("*/*.patch"))


async def apply_patch(patch: Path, *arguments: str, directory: Path) -> str:
    command = ("git", "apply", *arguments, str(patch))
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(directory.parent)}
    git = await asyncio.create_subprocess_exec(*command, cwd=directory, env=environment, stdout=asyncio.subprocess.PIPE)
    output, _ = await git.communicate()
    assert git.returncode == 0, patch
    return output.decode()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
async def test_a_patch_is_small_and_applies_where_the_client_is_there(patch: Path) -> None:
    listed = await apply_patch(patch, "--numstat", directory=ROOT)
    counted = [line.split()[:2] for line in listed.splitlines()]
    assert 0 < sum(int(number) for numbers in counted for number in numbers) <= 60
    client = ROOT / ".clients" / patch.stem.replace("-", "==", 1)
    if client.exists():
        await apply_patch(patch, "--check", directory=client)
