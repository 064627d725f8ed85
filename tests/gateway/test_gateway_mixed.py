"""Engines of several kinds in one fleet: what some of them cannot tell, the others do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec

TOLD = ("GetLoads", "GetServerInfo", "GetModelInfo", "CheckWeights")


@pytest.fixture
async def fleet(
    tmp_path: Path, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[InProcessFleet]:
    """Stage a can tell nothing, as SGLang-Diffusion has no loads; b everything."""
    every = FakeEngine.verbs()
    monkeypatch.setattr(FakeEngine, "verbs", lambda self: [verb for verb in every if verb not in TOLD])
    async with InProcessFleet(tmp_path / "journal.db", [StageSpec("a", checkpoint("one"))]) as fleet:
        monkeypatch.undo()
        await fleet.start_stage(StageSpec("b", checkpoint("one"), tp_size=2))
        await fleet.until(lambda stages: [stage.routable for stage in stages] == [True, True])
        yield fleet


async def ask(http: Any, path: str, method: str = "GET", **how: Any) -> tuple[int, Any]:
    async with http.request(method, path, **how) as response:
        return response.status, await response.json()


async def test_reads_are_of_those_that_can_tell(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet) as (_, http):
        for path in ("/model_info", "/server_info", "/v1/loads"):
            status, told = await ask(http, path)
            assert status == 200, (path, told)
            if path == "/v1/loads":
                assert [(load["dp_rank"], load["engine"]) for load in told["loads"]] == [(0, "b")]
            if path == "/server_info":
                assert told["engines"] == ["b"]
            status, told = await ask(http, f"/engines/a{path}")
            assert (status, told["error"]["reason"]) == (400, "UNSUPPORTED_BY_ALL")
        async with http.get("/v1/loads?format=prometheus") as response:
            assert response.status == 200
    async with make_gateway(fleet, dialect="vllm") as (_, http):
        status, told = await ask(http, "/server_info")
        servers = {url.rpartition("/")[2]: info for url, info in told["servers"].items()}
        assert (status, list(servers["a"]), "engine" in servers["b"]) == (200, ["error"], True)


async def test_whose_weights_were_not_checked_is_said(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet) as (_, http):
        status, told = await ask(http, "/weights_checker", "POST", json={"action": "checksum"})
        assert (status, told["success"]) == (400, False)
        assert (list(told["model_digest"]), len(told["ranks"])) == (["b"], 2)
        assert list(told["skipped"]) == ["a"]
        assert "CheckWeights" in told["skipped"]["a"]
        assert told["message"] == "checksum of 1 engines; of 1 it cannot be had: a."
        assert told["reason"] == "UNSUPPORTED"
