"""sglang-router, the real binary, in front of the gateway: its workers are the stages that serve."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.contract.errors import RlctlError
from rlctl.engine import Call
from rlctl.gateway.http.placeholders import ANY
from rlctl.gateway.router import process
from rlctl.gateway.router.process import SglangRouter
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

try:
    process.program()
except RlctlError:
    pytest.skip("sglang-router is not installed", allow_module_level=True)

ASK = {"text": "x", "sampling_params": {"max_new_tokens": 3}}


@pytest.fixture
async def router(fleet: InProcessFleet, tmp_path: Path) -> AsyncIterator[SglangRouter]:
    router = SglangRouter(policy="round_robin", log=tmp_path / "router.log")
    server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
    try:
        await server.start()
        yield router
    finally:
        await server.stop()


async def slots(router: SglangRouter) -> set[str]:
    return {url.rpartition("/routed/")[2] for url in await asyncio.to_thread(router.workers)}


async def until(router: SglangRouter, wanted: set[str]) -> None:
    has: set[str] = set()
    for _ in range(500):
        if (has := await slots(router)) == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"it has {has} and not {wanted}")


async def ask(router: SglangRouter, body: Any = ASK) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{router.url}/generate", json=body) as response:
        return response.status, await response.json()


def header(*slots: str) -> common.RequestHeader:
    return common.RequestHeader(target=common.Target(slots=slots))


async def test_what_is_in_the_fleet_is_not_asked_by_way_of_a_web_proxy(
    make_fleet: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of a cluster often have one, for what is outside."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with make_fleet(a=1, b=2) as fleet:
        router = SglangRouter(log=tmp_path / "router.log")
        server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
        try:
            await server.start()
            assert (await ask(router))[0] == 200
        finally:
            await server.stop()


async def test_its_workers_are_the_stages_that_serve(fleet: InProcessFleet, router: SglangRouter) -> None:
    await until(router, {"a", "b"})
    pause = common.PAUSE_MODE_ABORT
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("a"), mode=pause))
    await until(router, {"b"})
    assert (await ask(router))[0] == 200
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=header("a")))
    await until(router, {"a", "b"})
    await fleet.stages.pop("b").stop()
    await until(router, {"a"})
    assert [status for status, _ in await asyncio.gather(*(ask(router) for _ in range(8)))] == [200] * 8


async def test_updates_under_load_fail_no_request_and_no_token_is_stale(
    fleet: InProcessFleet, router: SglangRouter, checkpoint: Any
) -> None:
    await until(router, {"a", "b"})
    over = asyncio.Event()
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        while not over.is_set():
            before = fleet.server.coordinator.roster.fleet().models[0].latest.sequence
            status, reply = await ask(router)
            assert status == 200, reply
            seen.append((before, min(span["seq"] for span in reply["meta_info"]["weight_versions"])))

    asking = [asyncio.create_task(run()) for _ in range(4)]
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
    for number in range(5):
        await fleet.stub.UpdateWeightsFromDisk(
            v.UpdateWeightsFromDiskRequest(model_path=checkpoint(f"w{number}"), options=options)
        )
        await asyncio.sleep(0.1)
    over.set()
    await asyncio.gather(*asking)
    assert len({first for _, first in seen}) > 2, "at several versions"
    assert all(first >= before for before, first in seen)


async def test_a_stage_is_out_before_it_changes_and_in_when_it_serves(
    fleet: InProcessFleet, router: SglangRouter, checkpoint: Any
) -> None:
    await until(router, {"a", "b"})
    listed: list[tuple[str, str, set[str]]] = []

    async def note(engine: FakeEngine, method: str, _: Call) -> None:
        if method in ("pause_generation", "prepare_update"):
            (slot,) = (name for name, stage in fleet.stages.items() if stage._engine is engine)
            listed.append((slot, method, await slots(router)))

    fake_engine.FAULTS[checkpoint("one"), 0] = note
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("a"), mode=common.PAUSE_MODE_ABORT))
    assert listed == [("a", "pause_generation", {"b"})]
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=header("a")))
    await until(router, {"a", "b"})
    del listed[:]
    updated = await fleet.stub.UpdateWeightsFromDisk(
        v.UpdateWeightsFromDiskRequest(
            model_path=checkpoint("two"), options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
        )
    )
    assert updated.state == OPERATION_STATE_OK
    assert {(slot, method) for slot, method, _ in listed} == {
        (slot, method) for slot in ("a", "b") for method in ("pause_generation", "prepare_update")
    }
    assert all(workers == {ANY} for _, _, workers in listed), listed
    await until(router, {"a", "b"})


async def test_workers_say_where_their_tokenizer_lies(fleet: InProcessFleet, router: SglangRouter) -> None:
    """What is no directory the router looks for on the network."""
    await until(router, {"a", "b"})
    (published,) = fleet.server.coordinator.roster.fleet().models
    async with aiohttp.ClientSession() as http:
        for url in await asyncio.to_thread(router.workers):
            async with http.get(f"{url}/model_info") as response:
                told = await response.json()
            assert told["model_path"] == published.checkpoint != ""
            assert told["served_model_name"] == "actor"


async def test_a_router_that_ended_is_started_again(fleet: InProcessFleet, router: SglangRouter) -> None:
    await until(router, {"a", "b"})
    former = router.pid
    os.kill(former, signal.SIGKILL)
    await eventually(lambda: router.pid != former, 30.0)
    await eventually_answers(router)
    await until(router, {"a", "b"})
    assert (await ask(router))[0] == 200


async def eventually_answers(router: SglangRouter) -> None:
    async with asyncio.timeout(30.0):
        while True:
            try:
                await slots(router)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                return


async def test_while_nobody_serves_no_stage_is_listed_and_requests_wait(
    fleet: InProcessFleet, router: SglangRouter
) -> None:
    await until(router, {"a", "b"})
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
    assert await slots(router) == {ANY}
    waiting = asyncio.create_task(ask(router))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert (await waiting)[0] == 200
    await until(router, {"a", "b"})


async def test_a_caller_that_leaves_ends_its_request_through_both(fleet: InProcessFleet, router: SglangRouter) -> None:
    await until(router, {"a", "b"})
    engines: list[Any] = [stage._engine for stage in fleet.stages.values()]
    long = asyncio.create_task(ask(router, {"text": "x", "sampling_params": {"max_new_tokens": 100_000}}))
    await eventually(lambda: any(engine._running for engine in engines))
    long.cancel()
    await eventually(lambda: not any(engine._running for engine in engines))


async def test_whoever_reads_its_list_can_abort_at_each(fleet: InProcessFleet, router: SglangRouter) -> None:
    """As slime does: the workers of the router, and each one's /abort_request and /v1/loads."""
    await until(router, {"a", "b"})
    engines: list[Any] = [stage._engine for stage in fleet.stages.values()]
    long = [
        asyncio.create_task(ask(router, {"text": "x", "sampling_params": {"max_new_tokens": 100_000}})) for _ in "ab"
    ]
    await eventually(lambda: all(engine._running for engine in engines))
    async with aiohttp.ClientSession() as http:
        for url in await asyncio.to_thread(router.workers):
            async with http.post(f"{url}/abort_request", json={"abort_all": True}) as answer:
                assert answer.status == 200
            async with http.get(f"{url}/v1/loads?include=core") as answer:
                loads = (await answer.json())["loads"]
                assert [load["num_running_reqs"] for load in loads] == [0]
    for status, reply in await asyncio.gather(*long):
        assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")


async def test_it_ends_with_the_gateway(fleet: InProcessFleet, tmp_path: Path) -> None:
    router = SglangRouter(log=tmp_path / "router.log")
    server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
    await server.start()
    pid = router.pid
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_requests_by_way_of_it_end_before_it_does(
    fleet: InProcessFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the time of the gateway's drain, which is longer than a call of the router takes."""
    monkeypatch.setattr(process, "CALL_S", 1.0)
    router = SglangRouter(log=tmp_path / "router.log")
    server = GatewayServer(GatewayConfig(fleet.server.address, router=router))
    await server.start()
    try:
        await until(router, {"a", "b"})
        asking = asyncio.create_task(ask(router, {**ASK, "sampling_params": {"max_new_tokens": 2000}}))
        await eventually(lambda: server.generation.placed == 1)
    finally:
        await server.stop()
    status, reply = await asking
    assert (status, reply["meta_info"]["completion_tokens"]) == (200, 2000)


async def test_a_token_guards_its_list_of_workers_too(make_fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Whoever puts a server of their own on it gets prompts, and the token that comes with them."""
    token = "a token: made for this test"
    async with make_fleet(token=token, a=1) as fleet:
        router = SglangRouter(log=tmp_path / "router.log", token=token)
        server = GatewayServer(GatewayConfig(fleet.server.address, token=token, router=router))
        try:
            await server.start()
            await until(router, {"a"})
            async with aiohttp.ClientSession(router.url) as http:
                for header in ({}, {"Authorization": "Bearer other"}):
                    async with http.post("/workers", json={"url": "http://127.0.0.1:9"}, headers=header) as response:
                        assert response.status == 401, await response.text()
                    async with http.get("/workers", headers=header) as response:
                        assert response.status == 401, await response.text()
                    async with http.post("/generate", json=ASK, headers=header) as response:
                        assert response.status == 401, await response.text()
                async with http.post("/generate", json=ASK, headers={"Authorization": f"Bearer {token}"}) as response:
                    assert response.status == 200, await response.text()
            seen = Path(f"/proc/{router.pid}/cmdline").read_text()  # noqa: ASYNC240
            assert token not in seen, "everybody on this machine can read it"
            assert token not in (tmp_path / "router.log").read_text()
        finally:
            await server.stop()


async def test_requests_that_are_refused_do_not_close_the_way_for_others(
    fleet: InProcessFleet, router: SglangRouter
) -> None:
    """Its circuit breakers count every answer but 200 as the worker's failure: ten of a broken client's, one after the
    other, and for a minute nobody was let through.
    """
    await until(router, {"a", "b"})
    wrong = {"text": "x", "sampling_params": {"n": 5000}}
    assert {(await ask(router, wrong))[0] for _ in range(40)} == {400}
    assert (await ask(router))[0] == 200
