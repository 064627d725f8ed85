"""SGLang's interface in front of torch engines of two ranks and of one; and what slime and Miles send to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from models import changed
from sglang_suite import *  # noqa: F403 - the tests themselves
from sglang_suite import Server
from slime_publisher import SlimePublisher
from trainer_scripts import ended

import rlctl
from rlctl.weights.checkpoint.checkpoint import open_checkpoint
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.versions.publish import BaseVersion, publish_delta, publish_full

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

INTEGRATIONS = Path(__file__).parents[2] / "examples" / "integrations"


@pytest.mark.parametrize("trainer", ["slime", "miles", "verl"])
async def test_the_upstream_updates_end_in_equal_digests(server: Server, trainer: str) -> None:
    engines = [f"--engine={url}={ranks}" for url, ranks in zip(server.engines, server.ranks, strict=True)]
    script = await ended(INTEGRATIONS / trainer / "update.py", f"--model={server.tiny[1]}", *engines)
    assert script.returncode == 0, script.stderr
    steps = [json.loads(line) for line in script.stdout.splitlines()]
    assert [step["weight_version"] for step in steps] == [["1"], ["2"]]
    assert steps[0]["model_digest"] != steps[1]["model_digest"]


async def test_an_upstream_trainer_that_counts_other_ranks_is_told_so_at_once(server: Server) -> None:
    engines = [f"--engine={url}={ranks + 1}" for url, ranks in zip(server.engines, server.ranks, strict=True)]
    async with asyncio.timeout(60):
        script = await ended(INTEGRATIONS / "slime" / "update.py", f"--model={server.tiny[1]}", *engines)
    assert script.returncode == 1
    assert "the engines do not join: 400: " in script.stderr
    assert f"one source and the ranks of 2 stages make {1 + sum(server.ranks)}" in script.stderr


async def test_published_weights_are_pulled_and_loaded(server: Server, tmp_path: Path) -> None:
    """As slime and Miles do it over a disk: every engine is told, and both have one local directory."""
    source, local = tmp_path / "published", tmp_path / "local"
    models = [changed(server.tiny[0], seed=seed, scale=0.1) for seed in (1, 2)]
    publish_full(source, models[0].named_parameters(), version="1", sequence=1, files_from=server.tiny[1])
    for number, model in enumerate(models, 1):
        if number == 2:
            publish_delta(source, model.named_parameters(), version="2", sequence=2, base=BaseVersion(local))
        pull = {"source_dir": str(source), "local_checkpoint_dir": str(local), "target_version": number}
        load = {"model_path": str(local), "weight_version": str(number)}
        for path, body in (
            ("/pause_generation", {}),
            ("/pull_weights", pull),
            ("/update_weights_from_disk", load),
            ("/post_process_weights", {"post_process_quantization": True}),
            ("/continue_generation", {}),
        ):
            answers = await server.every("POST", path, body)
            assert [status for status, _ in answers] == [200, 200], (path, answers)
        told = await server.every("GET", "/get_weight_version")
        assert {body["weight_version"] for _, body in told} == {str(number)}
        checked = [body["model_digest"] for _, body in await server.every("POST", "/weights_checker", {})]
        assert {digest for each in checked for digest in each.values()} == {rlctl.model_digest(model)}
    status, refused = await server.ask("POST", "/pull_weights", {**pull, "target_version": 7})
    assert (status, refused["success"], refused["error"]["field"]) == (400, False, "target_version")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
async def test_slimes_deltas_are_pulled_and_loaded(server: Server, tmp_path: Path, encoding: str) -> None:
    """As ``update_weight_from_disk_delta.py`` of slime 624b824 does it: version 0, then one for each step."""
    source, local = tmp_path / "published", tmp_path / "local"
    stored = open_checkpoint(server.tiny[1])
    weights = {name: stored.read(name) for name in stored.metas}
    trainer = SlimePublisher(source, weights, encoding=encoding)

    async def everywhere(method: str, path: str, body: dict[str, object]) -> None:
        answers = await server.every(method, path, body)
        assert [status for status, _ in answers] == [200, 200], (path, answers)

    def pull(version: int) -> dict[str, object]:
        return {"local_checkpoint_dir": str(local), "source_dir": str(source), "target_version": version}

    await everywhere("POST", "/pull_weights", pull(0))
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        for name in list(weights)[number::3]:
            noise = torch.randn(weights[name].shape, generator=generator)
            weights[name] = (weights[name] + 0.1 * noise).to(weights[name].dtype)
        trainer.delta(weights)
        await everywhere("POST", "/pull_weights", pull(number))
        await everywhere("POST", "/pause_generation", {})
        await everywhere("GET", "/flush_cache", {})
        load = {"model_path": str(local), "weight_version": str(number)}
        await everywhere("POST", "/update_weights_from_disk", load)
        await everywhere("POST", "/continue_generation", {})
        told = await server.every("GET", "/get_weight_version")
        assert {body["weight_version"] for _, body in told} == {str(number)}
        expected = ModelDigest()
        for name, tensor in weights.items():
            expected.add(name, tensor)
        checked = [body["model_digest"] for _, body in await server.every("POST", "/weights_checker", {})]
        assert {digest for each in checked for digest in each.values()} == {expected.digest()}
    status, refused = await server.ask("POST", "/pull_weights", pull(3))
    assert (status, refused["success"], refused["error"]["field"]) == (400, False, "target_version")
    # A delta that does not fit what the engines have is refused, and nothing changes.
    wrong = SlimePublisher(source, {name: tensor + 1 for name, tensor in weights.items()}, encoding=encoding)
    wrong.number = 2
    wrong.delta({name: tensor + 2 for name, tensor in weights.items()})
    status, refused = await server.ask("POST", "/pull_weights", pull(3))
    assert (status, refused["success"], refused["error"]["reason"]) == (400, False, "DIGEST_MISMATCH")
    assert json.loads((local / "rlctl-manifest.json").read_text())["version"] == "2"
