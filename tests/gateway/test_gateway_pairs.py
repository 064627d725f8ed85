"""sglang-router, the real binary, in front of prefill and decode engines: it picks one of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from waiting import eventually

from rlctl.contract.errors import RlctlError
from rlctl.demo import tiny
from rlctl.gateway.generation import samples
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.placeholders import ANY
from rlctl.gateway.router import process, split_pairs
from rlctl.gateway.router.process import DECODE, PREFILL, SglangRouter
from rlctl.gateway.router.split_pairs import Halves
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.rollout.picking.router import Picked, Router
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

try:
    process.program()
except RlctlError:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

IDS = [tiny.VOCABULARY.index(c) for c in "3+5="]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
ASK: dict[str, Any] = {"input_ids": IDS, "sampling_params": GREEDY}
SLOTS = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    tiny.save(tiny.make(3), path)
    return str(path)


@pytest.fixture
async def fleet(path: str, tmp_path: Path) -> AsyncIterator[InProcessFleet]:
    specs = [
        StageSpec(slot, path, engine="torch", options={"disaggregation_mode": kind}, worker_type=kind)
        for slot, kind in SLOTS.items()
    ]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet:
        yield fleet


@pytest.fixture
async def server(fleet: InProcessFleet, tmp_path: Path) -> AsyncIterator[GatewayServer]:
    router = SglangRouter(policy="round_robin", log=tmp_path / "router.log", pairs=True)
    server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


@pytest.fixture
def router(server: GatewayServer) -> SglangRouter:
    assert server.config.router is not None
    return server.config.router


async def until(router: SglangRouter, **wanted: str) -> None:
    has: Any = None
    for _ in range(500):
        listed = await asyncio.to_thread(router._listed)
        has = {(worker["url"].rpartition("/")[2], worker["worker_type"]) for worker in listed}
        if has == set(wanted.items()):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it has {has} and not {wanted}")


async def ask(at: SglangRouter | str, path: str = "/generate", body: Any = ASK) -> tuple[int, Any]:
    url = f"http://{at}" if isinstance(at, str) else at.url
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        return response.status, await response.json(content_type=None)  # the router says octets of some


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the router has sent prefill halves."""
    found: list[str] = []
    prompt = Halves.prompt

    async def noted(self: Halves, call: Call) -> Reply:
        found.append(call.path[samples.PREFILL])
        return await prompt(self, call)

    monkeypatch.setattr(Halves, "prompt", noted)
    return found


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Which stages were asked, as (prefill, decode)."""
    found: list[tuple[str, str]] = []
    pick = Router.pick

    def noted(*args: Any) -> Picked | None:
        picked = pick(*args)
        if picked is not None:
            found.append(("" if picked.prefill is None else picked.prefill.registration.slot, picked.slot))
        return picked

    monkeypatch.setattr(Router, "pick", noted)
    return found


async def test_both_stages_are_those_that_the_router_has_picked(
    prompts: list[str], pairs: list[tuple[str, str]], router: SglangRouter
) -> None:
    await until(router, **SLOTS)
    answers = [await ask(router) for _ in range(6)]
    assert {status for status, _ in answers} == {200}
    assert len({tuple(reply["output_ids"]) for _, reply in answers}) == 1
    assert len(answers[0][1]["output_ids"]) == 6
    assert [prefill for prefill, _ in pairs] == prompts
    for half in zip(*pairs, strict=True):
        assert all(one != other for one, other in pairwise(half)), "each in turn"


async def test_every_route_that_generates_goes_to_pairs(server: GatewayServer, router: SglangRouter) -> None:
    await until(router, **SLOTS)
    whole = {"model": "actor", "prompt": "3+5=", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    scored = {**ASK, "return_logprob": True, "logprob_start_len": 0}
    for path, body in (
        ("/v1/completions", whole),
        ("/generate", scored),
        ("/generate", {**ASK, "input_ids": [IDS] * 3}),
    ):
        status, routed = await ask(router, path, body)
        assert status == 200, routed
        status, straight = await ask(server.address, path, body)
        assert status == 200, straight
        assert stable(routed) == stable(straight)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{router.url}/generate", json={**ASK, "stream": True}) as answer,
    ):
        events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["output_ids"] == (await ask(router))[1]["output_ids"]


def stable(reply: Any) -> Any:
    """An answer without what is each one's own."""
    if isinstance(reply, list):
        return [stable(each) for each in reply]
    if isinstance(reply, dict):
        own = ("id", "created", "e2e_latency", "cached_tokens")
        return {name: stable(value) for name, value in reply.items() if name not in own}
    return round(reply, 4) if isinstance(reply, float) else reply


async def test_the_radix_middleware_keeps_what_goes_through_the_router(fleet: InProcessFleet, tmp_path: Path) -> None:
    router = SglangRouter(policy="round_robin", log=tmp_path / "router.log", pairs=True)
    radix = ("rlctl.gateway.radix.middleware:RadixMiddleware",)
    server = GatewayServer(GatewayConfig(fleet.server.address, "slime", router=router, middleware_paths=radix))
    try:
        await server.start()
        await until(router, **SLOTS)
        status, reply = await ask(router, body={"text": "3+5=", "sampling_params": GREEDY})
        assert status == 200, reply
        status, known = await ask(server.address, "/retrieve_from_text", {"text": "3+5=" + reply["text"]})
        assert status == 200, known
        assert known["tokens"][-6:] == reply["output_ids"]
        assert known["loss_mask"][-6:] == [1] * 6
    finally:
        await server.stop()


async def test_what_is_wrong_with_a_request_is_said_at_once(router: SglangRouter) -> None:
    await until(router, **SLOTS)
    async with asyncio.timeout(5):
        status, reply = await ask(router, body={**ASK, "sampling_params": {**GREEDY, "top_p": 7}})
    assert status == 400
    assert "top_p" in json.dumps(reply)


async def test_lists_are_those_that_serve_and_requests_wait_while_a_half_is_missing(
    fleet: InProcessFleet, router: SglangRouter
) -> None:
    await until(router, **SLOTS)
    await fleet.stub.PauseGeneration(
        v.PauseGenerationRequest(
            header=common.RequestHeader(target=common.Target(slots=["p0", "p1"])), mode=common.PAUSE_MODE_ABORT
        )
    )
    await until(router, **{ANY: PREFILL}, d0=DECODE, d1=DECODE)
    waiting = asyncio.ensure_future(ask(router))
    done, _ = await asyncio.wait({waiting}, timeout=1.5)
    assert not done
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert (await waiting)[0] == 200
    await until(router, **SLOTS)


async def test_a_caller_that_leaves_ends_both_halves(fleet: InProcessFleet, router: SglangRouter) -> None:
    await until(router, **SLOTS)
    schedulers: list[Any] = [stage._engine._rank.scheduler for stage in fleet.stages.values()]  # type: ignore[attr-defined]
    long = asyncio.create_task(ask(router, body={**ASK, "sampling_params": {**GREEDY, "max_new_tokens": 400}}))
    await eventually(lambda: not all(scheduler.idle for scheduler in schedulers))
    long.cancel()
    await eventually(lambda: all(scheduler.idle for scheduler in schedulers))


async def test_a_half_without_its_other_is_answered(
    monkeypatch: pytest.MonkeyPatch, server: GatewayServer, router: SglangRouter
) -> None:
    await until(router, **SLOTS)
    monkeypatch.setattr(split_pairs, "MEET_S", 0.1)
    status, reply = await ask(server.address, "/routed/d0/generate", {**ASK, "bootstrap_room": 1})
    assert status == 200, reply
    assert len(reply["output_ids"]) == 6
    assert await ask(server.address, "/prefill/p0/generate", {**ASK, "bootstrap_room": 1}) == (200, {}), "a late one"
    assert await ask(server.address, "/prefill/p0/generate", ASK) == (200, {}), "no half at all"
