"""A frozen model beside the one that is trained: requests to the root that are about weights mean the latter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec

GROUP = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4, "rank_offset": 1, "backend": "gloo"}


@pytest.fixture
async def fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> AsyncIterator[InProcessFleet]:
    specs = [
        StageSpec("actor-0", checkpoint("one"), tp_size=2),
        StageSpec("actor-1", checkpoint("one")),
        StageSpec("ref-0", checkpoint("ref"), model="ref", frozen=True),
    ]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("dialect", "path", "body"),
    [
        ("omni", "/init_weights_update_group", GROUP),
        ("vllm", "/init_weight_transfer_engine", {"init_info": GROUP}),
    ],
)
async def test_a_groups_world_is_the_trained_models(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, path: str, body: Any
) -> None:
    async with open_gateway(fleet.server.address, dialect) as http, http.post(path, json=body) as response:
        told = await response.json()
        assert response.status == 200, told
    workers = [entry["worker"] for entry in told["results"]] if dialect == "omni" else list(told)
    assert [worker.rpartition("/")[2] for worker in workers] == ["actor-0", "actor-1"]


async def test_a_version_is_the_trained_models(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        async with http.post("/update_weight_version", json={"new_version": "named"}) as response:
            assert response.status == 200, await response.text()
        async with http.get("/weight_info") as response:
            told = {
                url.rpartition("/")[2]: each["body"]["weight_version"] for url, each in (await response.json()).items()
            }
    assert told == {"actor-0": "named", "actor-1": "named", "ref-0": "initial"}


async def test_a_gateway_of_one_model_lists_its_engines_only(fleet: InProcessFleet, open_gateway: Any) -> None:
    for dialect, path, key in (("vllm", "/servers", "servers"), ("slime", "/list_workers", "urls")):
        async with open_gateway(fleet.server.address, dialect, model="ref") as http, http.get(path) as response:
            assert [url.rpartition("/")[2] for url in (await response.json())[key]] == ["ref-0"]
