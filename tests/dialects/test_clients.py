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

from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "examples" / "integrations"


def fetched(client: str) -> Path:
    """Where the files of one lie."""
    path = ROOT / ".clients" / client
    if not path.exists():
        pytest.skip("tools/clients fetches it")
    return path


async def run(*command: str, clients: Path | str, **environment: str) -> list[Any]:
    script = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "PYTHONPATH": str(clients), **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await script.communicate()
    assert script.returncode == 0
    return [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]


@pytest.mark.parametrize("colocated", [False, True])
async def test_skyrls_client(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], colocated: bool
) -> None:
    clients = fetched("skyrl==0.3.0")
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tiny[1])) as http:
        steps = await run(
            *(sys.executable, str(INTEGRATIONS / "skyrl" / "client.py"), f"--model={tiny[1]}"),
            *(f"--proxy=http://{http._base_url.authority}", f"--coordinator={torch_fleet.address}"),
            *(["--colocated"] if colocated else []),
            clients=clients,
        )
    assert len({step["model_digest"] for step in steps}) == 2
    assert [(step["lengths"], step["stop_reasons"]) for step in steps] == [([60, 60], ["length"] * 2)] * 2


async def test_trls_client_generates(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """TRL 1.16.0's client; its updates need a GPU."""
    clients = fetched("trl==1.16.0")
    shutil.copytree(tiny[1], tmp_path / "chats", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = tmp_path / "chats" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tmp_path / "chats")) as http:
        told = await run(
            *(sys.executable, str(ROOT / "tests" / "support" / "trl_client.py"), f"http://{http._base_url.authority}"),
            clients=f"{clients}{os.pathsep}{ROOT}",
        )
    generated, chat, sequence, world = told
    assert [len(ids) for ids in generated["completion_ids"]] == [4] * 4
    assert [len(logprobs) for logprobs in generated["logprobs"]] == [4] * 4
    assert generated["prompt_ids"][0] == generated["prompt_ids"][1]
    assert (len(chat["prompt_ids"]), len(chat["completion_ids"])) == (1, 2)
    assert [len(entries) for entries in sequence["logprobs"][0]] == [3] * len(sequence["logprobs"][0])
    assert sequence["actual_token_ids"]
    assert world["size"] == 3


@pytest.mark.parametrize("stateful", [False, True])
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
