"""Tokens, binds, reflection and health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.any_pb2 import Any
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rlctl.command_stream.commander import Commander
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator import server
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.ports import SystemClock
from rlctl.runtime.addresses import is_loopback, join, split
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import auth
from rlctl.transport.auth import load_token
from rlctl.transport.channel import bearer, open_channel
from rlctl.transport.links import GrpcDialer
from rlctl.transport.status import from_grpc
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import rollout_pb2
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.v1.worker_pb2_grpc import WorkerServiceStub

TOKEN = "a token made for this test"


async def refusal(call: object) -> RlctlError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return from_grpc(caught.value)


async def test_a_token_guards_every_service(make_fleet: Callable) -> None:
    async with make_fleet(token=TOKEN, a=2) as fleet:
        stage = fleet.stages["a"]
        for address in (fleet.server.address, stage.address, stage.rollout_address, stage.config.followers[0]):
            async with open_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                check = health_pb2.HealthCheckRequest()
                for metadata in ((), bearer(TOKEN + "x"), bearer(TOKEN)):
                    assert (await health.Check(check, metadata=metadata)).status == 1, "probes have no token"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await health.Watch(check).read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                # Nothing is written: a client that writes into a refused stream may get INTERNAL from its core.
                reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await reflect.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(stage.address) as channel:
            call = StageServiceStub(channel).GetLoads(v.GetLoadsRequest())
            assert (await refusal(call)).reason is Reason.TOKEN_MISSING
        async with open_channel(stage.rollout_address) as channel:
            stub = RolloutServiceStub(channel)
            request = rollout_pb2.GenerateRequest(text="x")
            assert (await refusal(stub.Generate(request))).reason is Reason.TOKEN_MISSING
        async with open_channel(stage.config.followers[0]) as channel:
            call = WorkerServiceStub(channel).GetLoads(v.GetLoadsRequest())
            assert (await refusal(call)).reason is Reason.TOKEN_MISSING
        assert (await refusal(fleet.stub.GetFleet(c.GetFleetRequest()))).reason is Reason.TOKEN_MISSING
        basic = (("authorization", f"Basic {TOKEN}"),)
        scheme = await refusal(fleet.stub.GetFleet(c.GetFleetRequest(), metadata=basic))
        assert scheme.reason is Reason.TOKEN_MISSING
        lower = await fleet.stub.GetFleet(c.GetFleetRequest(), metadata=(("authorization", f"bearer {TOKEN}"),))
        assert len(lower.stages) == 1


async def test_a_token_that_no_call_can_carry_is_refused_in_typed_words(fleet: InProcessFleet, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    for environment, field in (
        ({"RLCTL_TOKEN": " \n"}, "token"),
        ({"RLCTL_TOKEN": "two\nlines"}, "token"),
        ({"RLCTL_TOKEN": "schl\u00fcssel"}, "token"),
        ({"RLCTL_TOKEN_FILE": str(file)}, "token_file"),
    ):
        with pytest.raises(RlctlError) as caught:
            load_token(environment)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)
    with pytest.raises(RlctlError, match="printable ASCII"):
        await aio.connect(fleet.server.address, token="two\nlines")


async def test_whoever_has_no_token_learns_so_and_does_not_wait_for_a_stage(make_fleet: Callable) -> None:
    async with make_fleet(token=TOKEN, a=1) as fleet:
        for token, reason in (("another", Reason.TOKEN_INVALID), ("", Reason.TOKEN_MISSING)):
            async with await aio.connect(fleet.server.address, token=token) as client:
                rollout = client.rollout("actor", resume="return")
                for call in (client.generate("x"), rollout.generate("x"), client.models()):
                    with pytest.raises(RlctlError) as caught:
                        await call
                    assert caught.value.reason is reason


async def test_a_stream_that_is_refused_says_why_whenever_its_first_message_comes(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends while a client of Python's writes ends at that client as an internal error."""
    async with make_fleet(token=TOKEN, a=1) as fleet, open_channel(fleet.stages["a"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)

        async def ask(after_s: float | None) -> Reason:
            call = stub.GenerateMany()
            if after_s is not None:
                await asyncio.sleep(after_s)
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(rollout_pb2.GenerateManyRequest())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            return from_grpc(caught.value).reason

        for _ in range(8):
            told = await asyncio.gather(*(ask(number * 1e-4) for number in range(50)))
            assert set(told) == {Reason.TOKEN_MISSING}
        monkeypatch.setattr(auth, "FIRST_S", 0.05)
        assert await asyncio.wait_for(ask(None), 10) is Reason.TOKEN_MISSING


async def test_a_wide_bind_without_a_token_needs_to_be_said(tmp_path: Path) -> None:
    server = CoordinatorServer(CoordinatorConfig(tmp_path / "j.db", "0.0.0.0:0"))
    with pytest.raises(RlctlError) as caught:
        await server.start()
    assert caught.value.reason is Reason.INSECURE_BIND
    assert "--insecure" in str(caught.value)
    await server.stop()
    for number, settings in enumerate(({"insecure": True}, {"token": TOKEN})):
        allowed = CoordinatorServer(CoordinatorConfig(tmp_path / f"{number}.db", "0.0.0.0:0", **settings))
        await allowed.start()
        await allowed.stop()


async def test_an_address_in_use_is_a_clear_error(fleet: InProcessFleet, tmp_path: Path) -> None:
    server = CoordinatorServer(CoordinatorConfig(tmp_path / "other.db", fleet.server.address))
    with pytest.raises(RlctlError, match="is in use by another process") as caught:
        await server.start()
    assert caught.value.field == "listen"
    await server.stop()


async def test_a_socket_in_use_is_left_to_whoever_answers_there(tmp_path: Path) -> None:
    """gRPC takes the place of any that it finds: trainers and stages would come back to another fleet."""
    first, second = (CoordinatorServer(CoordinatorConfig(tmp_path / name, f"unix:{tmp_path}/s")) for name in "ab")
    await first.start()
    with pytest.raises(RlctlError, match="in use by another process") as caught:
        await second.start()
    await second.stop()
    assert caught.value.reason is Reason.FIELD_INVALID
    async with await aio.connect(first.address) as fleet:
        assert (await fleet.status()).header.fleet_epoch == 1
    await first.stop()


async def test_a_socket_that_was_left_behind_is_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    server = CoordinatorServer(CoordinatorConfig(tmp_path / "a", f"unix:{tmp_path}/s"))
    await server.start()
    async with await aio.connect(server.address) as fleet:
        assert not (await fleet.status()).stages
    await server.stop()


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert load_token({}) is None
    assert load_token({"RLCTL_TOKEN": "x"}) == "x"
    assert load_token({"RLCTL_TOKEN": "x\n"}) == "x", "secrets of Kubernetes often end so"
    assert load_token({"RLCTL_TOKEN": "x", "RLCTL_TOKEN_FILE": str(file)}) == TOKEN
    assert load_token({"RLCTL_TOKEN_FILE": "/nowhere"}, file=str(file)) == TOKEN
    broken = {"none": None, "empty": b"\n", "no-text": b"\xff\xfe"}
    for name, content in broken.items():
        bad = str(tmp_path / name)
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RlctlError, match="token file"):
            load_token({"RLCTL_TOKEN": "x"}, file=bad)


def test_addresses() -> None:
    assert split("[::1]:80") == ("::1", 80)
    assert join("::1", 80) == "[::1]:80"
    assert join("127.0.0.1", 80) == "127.0.0.1:80"
    for bad in ("localhost", ":80", "a:b", "a:70000"):
        with pytest.raises(RlctlError, match="host:port"):
            split(bad)
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("x" * 64), "no host name: a part has 63 characters at most"
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no.such.host.invalid")


async def ask(channel: grpc.aio.Channel, **request: str) -> reflection_pb2.ServerReflectionResponse:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(**request))
    answer = await call.read()
    call.cancel()
    return answer


async def test_services_are_listed_and_described_by_reflection(fleet: InProcessFleet) -> None:
    stage = fleet.stages["b"]
    for address, service in (
        (fleet.server.address, "rlctl.v1.CoordinatorService"),
        (stage.address, "rlctl.v1.StageService"),
        (stage.rollout_address, "rlctl.v1.RolloutService"),
        (stage.config.followers[0], "rlctl.v1.WorkerService"),
    ):
        async with open_channel(address) as channel:
            listed = await ask(channel, list_services="")
            assert service in [s.name for s in listed.list_services_response.service]
            described = await ask(channel, file_containing_symbol=service)
            files = [
                descriptor_pb2.FileDescriptorProto.FromString(f)
                for f in described.file_descriptor_response.file_descriptor_proto
            ]
            assert service.rpartition(".")[2] in [s.name for f in files for s in f.service]


async def test_reflection_finds_a_method_and_nothing_that_does_not_exist(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.server.address) as channel:
        service = "rlctl.v1.CoordinatorService"
        files = (await ask(channel, file_containing_symbol=service)).file_descriptor_response
        method = await ask(channel, file_containing_symbol=f"{service}.PauseGeneration")
        assert method.file_descriptor_response == files
        for missing in (f"{service}.Nothing", "rlctl.v1.Nothing.PauseGeneration", "PauseGeneration"):
            answer = await ask(channel, file_containing_symbol=missing)
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_health_follows_the_stage(fleet: InProcessFleet) -> None:
    stage = fleet.stages["a"]
    async with open_channel(stage.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="rlctl.v1.StageService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await stage._admin._health.enter_graceful_shutdown()
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("request_", [v.PauseGenerationRequest(), v.GetModelInfoRequest()])
async def test_a_stream_of_somebody_who_was_not_accepted_commands_no_rank(
    make_fleet: Callable, request_: v.PauseGenerationRequest | v.GetModelInfoRequest
) -> None:
    async with make_fleet(a=2) as fleet:
        stage = fleet.stages["a"]
        for stub, address in ((WorkerServiceStub, stage.config.followers[0]), (StageServiceStub, stage.address)):
            commander = Commander(await GrpcDialer(stub, None).dial(address), SystemClock())
            receiving = asyncio.create_task(commander.run())
            body = Any()
            body.Pack(request_)
            issued = commander.issue("stranger", "stranger", body, SystemClock().now() + 5)
            result = await asyncio.wait_for(issued.result, 5)
            assert "EPOCH_FENCED" in (result.rank.error.reason, result.stage.error.reason)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        # The rank's turn was not taken.
        paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        assert paused.state == OPERATION_STATE_OK


async def test_watches_that_nobody_reads_are_bounded_for_each_host(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server.MOST_STREAMS, "WatchFleet", 3)
    async with make_fleet(a=1) as fleet:
        watches = [fleet.stub.WatchFleet(c.WatchFleetRequest()) for _ in range(3)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.stub.WatchFleet(c.WatchFleetRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_grpc(caught.value).reason is Reason.TOO_MANY_STREAMS
        watches[0].cancel()

        watch = fleet.stub.WatchFleet(c.WatchFleetRequest())
        for _ in range(500):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await watch.read()
                break
            await asyncio.sleep(0.01)
            watch = fleet.stub.WatchFleet(c.WatchFleetRequest())
        else:
            pytest.fail("the place of a watch that has ended is not given back")
