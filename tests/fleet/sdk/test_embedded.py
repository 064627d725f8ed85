"""A coordinator inside the trainer's process: takes charge of stages, comes back with its journal, leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from children import Child
from waiting import eventually

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig, EngineInfo, recognise
from rlctl.launch import embedded
from rlctl.launch.local.child_processes import Process
from rlctl.sdk import aio
from rlctl.stage.server import StageConfig, StageServer
from rlctl.testing.fake_engine import FakeEngine
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

THREADS = ("rlctl coordinator", "rlctl client")


@pytest.fixture
async def stages(checkpoint: Callable[[str], str]) -> AsyncIterator[list[str]]:
    """Addresses of two stage servers that no coordinator has charge of."""
    config = EngineConfig(checkpoint("one"))
    servers = [StageServer(StageConfig(slot, "actor", "fake", config)) for slot in "ab"]
    for server in servers:
        await server.start()
    yield [server.address for server in servers]
    for server in servers:
        await server.stop()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in THREADS]


async def refusal(*arguments: Any, **settings: Any) -> RlctlError:
    """Why it does not start; nothing of it is left."""
    with pytest.raises(RlctlError) as caught:
        await asyncio.to_thread(rlctl.embedded, *arguments, **settings)
    assert not threads()
    return caught.value


async def test_it_takes_charge_of_stages_and_knows_their_version_when_it_comes_back(
    stages: list[str], checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal.db"

    def first() -> None:
        with rlctl.embedded(stages, journal=journal) as fleet:
            assert [stage.routable for stage in fleet.status().stages] == [True, True]
            options = v.UpdateOptions(pause=common.PAUSE_MODE_ABORT)
            operation = fleet.update_weights_from_disk(checkpoint("two"), version="two", options=options)
            assert operation.state == OPERATION_STATE_OK
            with rlctl.connect(fleet.address) as other:
                assert other.generate([1, 2], max_new_tokens=2).samples[0].versions[0].version.label == "two"
        assert not threads()

    def second() -> None:
        with rlctl.embedded(stages, journal=journal) as fleet:
            status = fleet.status()
            assert [model.latest.label for model in status.models] == ["two"]
            assert [stage.routable for stage in status.stages] == [True, True]
            assert fleet.generate([1, 2], max_new_tokens=2).samples[0].versions[0].version.label == "two"

    await asyncio.to_thread(first)
    await asyncio.to_thread(second)
    assert not threads()


async def test_without_the_journal_of_before_the_first_version_is_the_one_that_the_stages_are_at(
    stages: list[str], checkpoint: Callable[[str], str]
) -> None:
    def run(label: str, path: str, latest: tuple[str, int]) -> None:
        with rlctl.embedded(stages) as fleet:
            (model,) = fleet.status().models
            assert (model.latest.label, model.latest.sequence) == latest
            assert [stage.routable for stage in fleet.status().stages] == [True, True]
            fleet.update_weights_from_disk(path, version=label)
            assert fleet.generate([1, 2], max_new_tokens=2).samples[0].versions[0].version.label == label

    await asyncio.to_thread(run, "two", checkpoint("two"), ("initial", 1))
    await asyncio.to_thread(run, "three", checkpoint("three"), ("two", 2))


async def test_a_coordinator_with_certificates_takes_charge_of_a_stage_with_one(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    config = StageConfig("a", "actor", "fake", EngineConfig(checkpoint("one")), tls=Tls(authority.ensured("stage/a")))
    stage = StageServer(config)
    await stage.start()

    def use() -> None:
        with rlctl.embedded([stage.address], tls=authority.directory) as fleet:
            assert [each.routable for each in fleet.status().stages] == [True]
            with pytest.raises(RlctlError) as caught:
                rlctl.connect(fleet.address, tls=False, timeout_s=5)
            assert caught.value.reason is Reason.TLS_FAILED

    try:
        plain = await refusal([stage.address])
        assert (plain.reason, stage.address in plain.message) == (Reason.TLS_FAILED, True)
        await asyncio.to_thread(use)
    finally:
        await stage.stop()


async def test_a_stage_that_does_not_answer_leaves_nothing_behind(stages: list[str]) -> None:
    gone = "127.0.0.1:1"
    error = await refusal([stages[0], gone])
    assert error.reason is Reason.UNREACHABLE
    assert gone in error.message
    error = await refusal(stages, listen="0.0.0.0:0")
    assert error.reason is Reason.INSECURE_BIND


async def test_one_that_could_not_start_leaves_its_journal_to_the_next(stages: list[str], tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    for listen, reason in (("0.0.0.0:0", Reason.INSECURE_BIND), (stages[0], Reason.FIELD_INVALID)):
        assert (await refusal(stages, journal=journal, listen=listen)).reason is reason
        assert "journal" not in [thread.name for thread in threading.enumerate()]
    with await asyncio.to_thread(rlctl.embedded, stages, journal=journal):
        pass


async def test_a_stage_that_still_loads_is_said_to_load(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = StageServer(StageConfig("a", "actor", "fake", EngineConfig(checkpoint("one"))))
    loaded, start = asyncio.Event(), FakeEngine.start

    async def load(engine: FakeEngine, setup: Mapping[str, str]) -> EngineInfo:
        await loaded.wait()
        return await start(engine, setup)

    monkeypatch.setattr(FakeEngine, "start", load)
    starting = asyncio.create_task(server.start())
    await eventually(lambda: bool(server.rollout_address))
    error = await refusal([server.address])
    assert (error.reason, error.message) == (Reason.STAGE_NOT_SERVING, "a is still loading")
    loaded.set()
    await starting
    with await asyncio.to_thread(rlctl.embedded, [server.address]):
        pass
    await server.stop()


async def test_a_client_that_does_not_connect_leaves_nothing_behind(
    stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise Reason.UNREACHABLE.error("no")

    with monkeypatch.context() as patched:
        patched.setattr(aio, "connect", fail)
        assert (await refusal(stages)).reason is Reason.UNREACHABLE
    with await asyncio.to_thread(rlctl.embedded, stages):
        pass


async def test_what_is_asked_after_the_end_is_refused_with_a_reason(stages: list[str]) -> None:
    fleet = await asyncio.to_thread(rlctl.embedded, stages)
    async with await aio.connect(fleet.address) as client:
        rollout = client.rollout("actor")
        await client.models()
    calls = [client.status(), client.generate([1], max_new_tokens=1), rollout.generate([1]), client.models()]
    for call in (*calls, anext(client.watch()), client.generate_batch([[1]])):
        with pytest.raises(RlctlError) as caught:
            await asyncio.wait_for(call, 5)
        assert caught.value.reason is Reason.CANCELLED
        assert "closed" in caught.value.message
    await asyncio.to_thread(fleet.close)
    await asyncio.to_thread(fleet.close)
    with pytest.raises(RlctlError) as caught:
        await asyncio.to_thread(fleet.status)
    assert caught.value.reason is Reason.CANCELLED


# Servers at URLs. Real ones are attached to in tests/sglang and tests/vllm.


async def serve(routes: dict[str, Any]) -> tuple[web.AppRunner, str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return routes[request.path](request)

    app = web.Application()
    app.add_routes([web.get(path, answer) for path in routes])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


def keyed(body: Any) -> Callable[[web.Request], web.Response]:
    def answer(request: web.Request) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer secret"
        return web.json_response(body) if known else web.json_response({"error": "Unauthorized"}, status=401)

    return answer


SGLANG = {"/model_info": keyed({"model_path": "/models/one"})}
DIFFUSION = {"/model_info": keyed({"model_path": "/models/three", "model_type": "diffusion"})}
VLLM = {
    "/version": lambda _: web.json_response({"version": "1"}),
    "/v1/models": keyed({"data": [{"root": "/models/two"}]}),
}


@pytest.mark.parametrize(
    ("routes", "kind"),
    [
        (SGLANG, ("sglang", "/models/one")),
        (DIFFUSION, ("sglang-diffusion", "/models/three")),
        (VLLM, ("vllm", "/models/two")),
    ],
    ids=["sglang", "sglang-diffusion", "vllm"],
)
async def test_a_server_is_recognised_by_its_answers(routes: Any, kind: tuple[str, str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    runner, url = await serve(routes)
    assert await recognise(url + "/", {"api_key_file": str(key)}) == kind
    error = await refusal([url])
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "options.api_key_file")
    await runner.cleanup()


async def test_what_is_at_a_url_is_no_engine_or_nothing() -> None:
    runner, url = await serve({"/": lambda _: web.Response(text="welcome")})
    error = await refusal([url])
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "url")
    assert "sglang or sglang-diffusion or vllm" in error.message
    await runner.cleanup()
    error = await refusal([url])
    assert error.reason is Reason.UNREACHABLE
    assert url in error.message
    error = await refusal(["grpc://127.0.0.1:1"])
    assert error.reason is Reason.FIELD_INVALID


async def test_a_server_that_cannot_be_attached_to_is_said_to_be_with_its_reason(tmp_path: Path) -> None:
    runner, url = await serve({"/model_info": lambda _: web.json_response({"model_path": str(tmp_path)})})
    error = await refusal([url], journal=tmp_path / "journal.db")
    assert error.reason is Reason.ENGINE_FAILED
    assert "actor-0" in error.message
    assert str(tmp_path) in error.message
    assert "logs/actor-0.log" in error.next_step
    await runner.cleanup()


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:", "127.0.0.1:99999"])
async def test_what_is_no_address_is_not_dialled(address: str) -> None:
    """gRPC would go to port 443, or to what is left of the port in 16 bits: to somebody else."""
    for error in (
        await refusal([address]),
        await refused_by(lambda: rlctl.connect(address)),
    ):
        assert error.reason is Reason.FIELD_INVALID
        assert f"{address!r} is not host:port" in error.message


async def refused_by(connecting: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await asyncio.to_thread(connecting)
    return caught.value


def test_a_server_that_does_not_get_attached_is_told_with_the_time_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOAD_S", 0.2)
    child: Any = Child("actor-0", [])
    child.announced = Process.announced.__get__(child)
    child._announced = threading.Event()
    with pytest.raises(RlctlError, match=r"actor-0 is not attached after 0.2 s") as caught:
        embedded._announced(child)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
