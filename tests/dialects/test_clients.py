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
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "examples" / "integrations"

sys.path.insert(0, str(INTEGRATIONS))

from tiny_trainer import free_port  # noqa: E402


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


TRL = str(ROOT / "tests" / "support" / "trl_client.py")


async def test_trls_client_generates(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """TRL 1.16.0's client, with the cases of TRL's own tests (``tests/test_vllm_client_server.py``)."""
    clients = fetched("trl==1.16.0")
    shutil.copytree(tiny[1], tmp_path / "chats", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = tmp_path / "chats" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tmp_path / "chats")) as http:
        told = await run(
            *(sys.executable, TRL, f"http://{http._base_url.authority}", "0"),
            clients=f"{clients}{os.pathsep}{ROOT}",
        )
    generated, chat, sequence, world, *own = told
    assert [len(ids) for ids in generated["completion_ids"]] == [4] * 4
    assert [len(logprobs) for logprobs in generated["logprobs"]] == [4] * 4
    assert generated["prompt_ids"][0] == generated["prompt_ids"][1]
    assert (len(chat["prompt_ids"]), len(chat["completion_ids"])) == (1, 2)
    assert [len(entries) for entries in sequence["logprobs"][0]] == [3] * len(sequence["logprobs"][0])
    assert sequence["actual_token_ids"]
    assert world["size"] == 3
    texts, no_logprobs, chat_without, with_settings, several = own
    assert [len(texts[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [2, 2, 2]
    assert all(isinstance(token, int) for ids in (*texts["prompt_ids"], *texts["completion_ids"]) for token in ids)
    for each in (no_logprobs, chat_without):
        assert (each["logprobs"], each["logprob_token_ids"], len(each["completion_ids"])) == (None, None, 1)
    assert len(with_settings["completion_ids"]) == 4
    assert all(len(ids) <= 32 for ids in with_settings["completion_ids"])
    for ids, logprobs, tokens in zip(
        several["completion_ids"], several["logprobs"], several["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(logprobs) == len(tokens)
        for token, among, each in zip(ids, tokens, logprobs, strict=True):
            assert token in among
            assert 5 <= len(each) <= 6
            assert each == sorted(each, reverse=True)


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
