"""A fleet over mTLS: who reaches whom, what refuses whom, and certificates that are renewed while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from passed_answers import Pieces, once
from updating import begin, commit, digest, join, weights, write
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.engine import HttpExchange, HttpRequest, HttpRoute
from rlctl.gateway.backend.data_ports import DataPorts
from rlctl.ports import SystemClock
from rlctl.runtime.addresses import split
from rlctl.sdk import aio
from rlctl.stage.data_port.server import DataPort
from rlctl.stage.server import StageConfig, StageServer
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.trainer.member_streams import Lead, Members
from rlctl.transport.channel import open_channel
from rlctl.transport.links import GrpcDialer
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.files import TlsFiles
from rlctl.transport.tls.identity import Role
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.control_pb2 import Attach, ControlRequest
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.rollout_pb2 import AbortRequest
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.v1.trainer_pb2_grpc import TrainerServiceStub
from rlctl.v1.worker_pb2_grpc import WorkerServiceStub


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.init(tmp_path / "tls", "lab")


def of(authority: Authority, path: str) -> Tls:
    return Tls(authority.ensured(path))


async def failure(call: Any) -> RlctlError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_grpc(caught.value)


async def refused(connecting: Any) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await connecting
    return caught.value


async def test_a_fleet_over_mtls_is_updated_generates_and_refuses_the_wrong_callers(
    make_fleet: Callable, authority: Authority, tmp_path: Path
) -> None:
    async with make_fleet(authority=authority, a=2, b=1) as fleet:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
        assert weights(fleet) == ["w1"] * 3
        async with await aio.connect(fleet.server.address, tls=of(authority, "trainer/t")) as client:
            sample = await client.generate("hello", model="actor", max_new_tokens=1)
            assert sample.weight_version.label == "step-1"
        await stages_accept_their_coordinator_only(fleet, authority)
        await workers_accept_their_stage_only(fleet, authority)
        await stages_speak_for_their_own_slot_only(fleet, authority)
        await connections_without_the_right_certificate_fail_with_the_reason(fleet, authority, tmp_path)


async def stages_accept_their_coordinator_only(fleet: InProcessFleet, authority: Authority) -> None:
    stage = fleet.stages["a"]
    for path in ("client/alice", "stage/b", "worker/a", "gateway/g"):
        async with open_channel(stage.address, of(authority, path), Role.STAGE) as channel:
            error = await failure(StageServiceStub(channel).GetLoads(v.GetLoadsRequest()))
            assert error.reason is Reason.PEER_NOT_ALLOWED
            assert error.message.startswith(f"rlctl://lab/{path} may not call GetLoads of rlctl.v1.StageService")
        link = await GrpcDialer(StageServiceStub, None, of(authority, path)).dial(stage.address)
        link.send(ControlRequest(attach=Attach(slot="a")))
        with pytest.raises(RlctlError) as caught:
            [_ async for _ in link.receive()]
        assert caught.value.reason is Reason.PEER_NOT_ALLOWED
        async with open_channel(stage.address, of(authority, path), Role.STAGE) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == 1, "health is for every identity of the fleet"
    async with open_channel(stage.address, of(authority, "coordinator"), Role.STAGE) as channel:
        await StageServiceStub(channel).GetLoads(v.GetLoadsRequest())
    async with open_channel(stage.rollout_address, of(authority, "stage/b"), Role.STAGE) as channel:
        error = await failure(RolloutServiceStub(channel).Abort(AbortRequest(rids=["x"])))
        assert error.reason is Reason.PEER_NOT_ALLOWED


async def workers_accept_their_stage_only(fleet: InProcessFleet, authority: Authority) -> None:
    address = fleet.stages["a"].config.followers[0]
    for path, said in (("coordinator", "may not call"), ("stage/b", "is not the stage of rlctl://lab/worker/a")):
        async with open_channel(address, of(authority, path), Role.WORKER) as channel:
            error = await failure(WorkerServiceStub(channel).GetLoads(v.GetLoadsRequest()))
            assert error.reason is Reason.PEER_NOT_ALLOWED
            assert said in error.message
    async with open_channel(address, of(authority, "stage/a"), Role.WORKER) as channel:
        await WorkerServiceStub(channel).GetLoads(v.GetLoadsRequest())


async def stages_speak_for_their_own_slot_only(fleet: InProcessFleet, authority: Authority) -> None:
    async with open_channel(fleet.server.address, of(authority, "stage/b")) as channel:
        stub = CoordinatorServiceStub(channel)
        before = fleet.server.coordinator.roster.fleet()
        request = c.RegisterStageRequest(registration=fleet.stages["a"]._stage.registration)  # type: ignore[union-attr]
        for call in (stub.RegisterStage(request), stub.DeregisterStage(c.DeregisterStageRequest(slot="a", force=True))):
            error = await failure(call)
            assert error.reason is Reason.PEER_NOT_ALLOWED
            assert "rlctl://lab/stage/b may not act for slot 'a'" in error.message
        assert (await failure(stub.GetFleet(c.GetFleetRequest()))).reason is Reason.PEER_NOT_ALLOWED
        assert [s.registration.slot for s in fleet.server.coordinator.roster.fleet().stages] == [
            s.registration.slot for s in before.stages
        ]
    async with open_channel(fleet.server.address, of(authority, "client/alice")) as channel:
        registration = StageRegistration(slot="c")
        call = CoordinatorServiceStub(channel).RegisterStage(c.RegisterStageRequest(registration=registration))
        assert (await failure(call)).reason is Reason.PEER_NOT_ALLOWED


async def connections_without_the_right_certificate_fail_with_the_reason(
    fleet: InProcessFleet, authority: Authority, tmp_path: Path
) -> None:
    address = fleet.server.address
    plain = await refused(aio.connect(address, tls=False, timeout_s=5))
    assert plain.reason is Reason.TLS_FAILED
    assert f"{address} accepts TLS connections only" in plain.message
    assert "RLCTL_TLS_CA" in plain.next_step
    plain = await refused(GrpcDialer(StageServiceStub, None).dial(fleet.stages["a"].address))
    assert plain.reason is Reason.TLS_FAILED

    alice = of(authority, "client/alice")
    name = await refused(GrpcDialer(StageServiceStub, None, of(authority, "coordinator")).dial(address))
    assert name.message == (
        f"{address}: its certificate is not of stage.lab.rlctl.internal, so it is not the stage of this fleet"
    )
    other = Authority.init(tmp_path / "other", "lab")
    unknown = await refused(aio.connect(address, tls=of(other, "client/alice"), timeout_s=5))
    assert f"{address}: its certificate was not issued by the CA in {other.directory}/ca.crt" in unknown.message
    forged = other.issue("client/alice")
    forged.ca.write_bytes((authority.directory / "ca.crt").read_bytes() + forged.ca.read_bytes())
    distrusted = await refused(aio.connect(address, tls=Tls(forged), timeout_s=5))
    assert f"{address}: it refused {forged.cert} (rlctl://lab/client/alice)" in distrusted.message
    assert {each.reason for each in (name, unknown, distrusted)} == {Reason.TLS_FAILED}

    # A TLS client without a certificate, as another program may be.
    root = (authority.directory / "ca.crt").read_bytes()
    credentials = grpc.ssl_channel_credentials(root)
    options = (("grpc.ssl_target_name_override", "localhost"),)
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        error = await failure(CoordinatorServiceStub(channel).GetFleet(c.GetFleetRequest()))
        assert error.reason is Reason.UNREACHABLE
    async with grpc.aio.secure_channel(address, alice.channel_credentials(), options) as channel:
        await CoordinatorServiceStub(channel).GetFleet(c.GetFleetRequest())


async def test_a_stage_says_why_it_does_not_register(make_fleet: Callable, authority: Authority, caplog: Any) -> None:
    async with make_fleet(authority=authority, a=1) as fleet:
        config = fleet.stages["a"].config
        stage = StageServer(StageConfig("c", "actor", "fake", config.engine_config, coordinator=fleet.server.address))
        try:
            await stage.start()
            await eventually(lambda: "accepts TLS connections only" in caplog.text)
        finally:
            await stage.stop()
    with pytest.raises(RlctlError, match="this process needs stage/c"):
        StageServer(StageConfig("c", "actor", "fake", config.engine_config, tls=of(authority, "stage/a")))


async def test_a_client_with_a_certificate_says_that_the_server_has_none(fleet: InProcessFleet, tmp_path: Path) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    error = await refused(aio.connect(fleet.server.address, tls=of(authority, "client/alice"), timeout_s=5))
    assert (error.reason, error.message) == (Reason.TLS_FAILED, f"{fleet.server.address}: it does not speak TLS")


async def serial(address: str, tls: Tls, role: Role) -> int:
    """Number of the certificate that a server presents."""

    def ask() -> int:
        context = tls.client_context()
        context.set_alpn_protocols(["h2"])
        name = tls.peer_name(role)
        with (
            socket.create_connection(split(address)) as connection,
            context.wrap_socket(connection, server_hostname=name) as wrapped,
        ):
            certificate = wrapped.getpeercert(binary_form=True)
        assert certificate is not None
        return x509.load_der_x509_certificate(certificate).serial_number

    return await asyncio.to_thread(ask)


def number(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


async def test_a_renewed_certificate_is_used_for_new_connections_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    config = CoordinatorConfig(tmp_path / "journal.db", tls=of(authority, "coordinator"), listen="127.0.0.1:0")
    server = CoordinatorServer(config)
    await server.start()
    # A client whose certificate ends soon, connected before it does.
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1, seconds=-2)
    ends_at = asyncio.get_running_loop().time() + 2
    alice = Tls(authority.issue("client/alice", days=1, begins=begins))
    client = await aio.connect(server.address, tls=alice)
    try:
        assert await serial(server.address, alice, Role.COORDINATOR) == number(config.tls.files.cert)  # type: ignore[union-attr]
        renewed = authority.issue("coordinator")
        assert await serial(server.address, alice, Role.COORDINATOR) == number(renewed.cert)
        assert (await client.status()).header.fleet_epoch == 1, "the connection of before goes on"
        authority.issue("client/alice")
        await asyncio.sleep(ends_at - asyncio.get_running_loop().time() + 0.1)
        await server.stop()
        server = CoordinatorServer(CoordinatorConfig(config.journal, server.address, tls=config.tls))
        await server.start()
        assert (await client.status()).header.fleet_epoch == 2, "it has connected with the renewed certificate"
    finally:
        await client.close()
        await server.stop()


async def test_a_certificate_that_has_expired_is_named_with_its_time_and_the_next_step(
    make_fleet: Callable, authority: Authority
) -> None:
    async with make_fleet(authority=authority, a=1) as fleet:
        address = fleet.server.address
        begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1, seconds=-3)
        authority.issue("coordinator", days=1, begins=begins)
        bob = Tls(authority.issue("client/bob", days=1, begins=begins))
        ends = f"expired at {begins + datetime.timedelta(days=1):%F %T}+00:00, and this host's clock says"
        await serial(address, bob, Role.COORDINATOR)  # the server reads its files at a handshake
        await asyncio.sleep(4)

        alice = of(authority, "client/alice")
        error = await refused(aio.connect(address, tls=alice, timeout_s=5))
        assert error.reason is Reason.TLS_FAILED
        assert f"{address}: its certificate, of rlctl://lab/coordinator, {ends}" in error.message
        assert "`rlctl certs issue DIR coordinator`" in error.next_step

        authority.issue("coordinator")
        async with await aio.connect(address, tls=alice, timeout_s=5) as client:
            assert (await client.status()).stages[0].routable
        error = await refused(aio.connect(address, tls=bob, timeout_s=5))
        assert f"it refused {bob.files.cert} (rlctl://lab/client/bob), which {ends}" in error.message
        assert "`rlctl certs issue DIR client/bob`" in error.next_step


async def test_stages_with_a_failed_handshake_are_named_with_the_cause(
    make_fleet: Callable, authority: Authority, tmp_path: Path
) -> None:
    files = TlsFiles(tmp_path / "ca.crt", tmp_path / "alice.crt", tmp_path / "alice.key")

    def use(issued: TlsFiles) -> None:
        for name in ("ca", "cert", "key"):
            getattr(files, name).write_bytes(getattr(issued, name).read_bytes())

    use(authority.issue("client/alice"))
    async with (
        make_fleet(authority=authority, a=1, b=1) as fleet,
        await aio.connect(fleet.server.address, tls=Tls(files)) as client,
    ):
        rollout, single = client.rollout("actor", retries=100), client.rollout("actor", retries=1)
        await rollout._lines.view.reported()
        use(Authority.init(tmp_path / "other", "lab").issue("client/alice"))  # the connection to the coordinator stays
        cause = f"its certificate was not issued by the CA in {files.ca}"
        for generating in (
            rollout.generate([0], max_new_tokens=1, timeout_s=1),
            client.generate("x", max_new_tokens=1, timeout_s=1),
        ):
            error = await refused(generating)
            assert error.reason is Reason.NO_ROUTABLE_STAGE
            for slot in "ab":
                assert f"{slot} failed ({fleet.stages[slot].rollout_address}: {cause}" in error.message
            assert "docs/tls.md" in error.next_step
        error = await refused(single.generate([0], max_new_tokens=1))
        assert (error.reason, cause in error.message) == (Reason.TLS_FAILED, True), error


async def test_the_ranks_of_a_trainer_are_joined_over_mtls(authority: Authority) -> None:
    members = Members(2)
    with pytest.raises(RlctlError, match="this process needs trainer or coordinator"):
        await members.start("127.0.0.1", of(authority, "client/alice"))
    address, token = await members.start("127.0.0.1", of(authority, "trainer/0"))
    try:
        lead = await Lead.join(1, address, token, of(authority, "trainer/1"))
        await lead.close()
        assert (await refused(Lead.join(1, address, token))).reason is Reason.TLS_FAILED
        for path in ("stage/a", "client/alice"):
            link = await GrpcDialer(TrainerServiceStub, token, of(authority, path), Role.TRAINER, method="Join").dial(
                address
            )
            with pytest.raises(RlctlError) as caught:
                [_ async for _ in link.receive()]
            assert caught.value.reason is Reason.PEER_NOT_ALLOWED
    finally:
        await members.close()


async def test_a_unix_socket_has_tls_as_every_address(authority: Authority, tmp_path: Path) -> None:
    tls = of(authority, "coordinator")
    config = CoordinatorConfig(tmp_path / "journal.db", listen=f"unix:{tmp_path}/c.sock", tls=tls)
    server = CoordinatorServer(config)
    await server.start()
    try:
        async with await aio.connect(server.address, tls=of(authority, "client/alice")) as client:
            assert (await client.status()).header.fleet_epoch == 1
        assert (await refused(aio.connect(server.address, tls=False, timeout_s=5))).reason is Reason.TLS_FAILED
    finally:
        await server.stop()


class Engine:
    async def exchange(self, request: HttpRequest) -> HttpExchange:
        return Pieces("text/plain", once(b"answered"))


async def test_a_data_port_answers_gateways_and_users_of_its_fleet(make_fleet: Callable, authority: Authority) -> None:
    async with make_fleet(a=1) as fleet:
        engine: Any = Engine()
        port = DataPort(lambda: engine, fleet.stages["a"]._serving, SystemClock(), tls=of(authority, "stage/a"))
        address = await port.start("127.0.0.1:0", [HttpRoute("GET", "/v1/models", gated=False)])
        registration = SimpleNamespace(slot="a", data_address=address)
        attempt: Any = SimpleNamespace(stage=SimpleNamespace(registration=registration), on_loss=lambda _: lambda: None)

        other = Authority.init(authority.directory / "other", "lab")

        def spoil(path: str) -> None:
            """Replace a certificate by one of a different CA."""
            foreign, files = other.ensured(path), authority.files(path)
            shutil.copy(foreign.cert, files.cert)
            shutil.copy(foreign.key, files.key)

        async def ask(tls: Tls | None, spoilt: str = "") -> bytes:
            ports = DataPorts(tls)
            if spoilt:
                spoil(spoilt)
            try:
                with contextlib.closing(ports.at(attempt)) as exchange:
                    await exchange.begin("GET", "/v1/models", {}, b"", None)
                    return await exchange.read()
            finally:
                ports.close()

        try:
            # The earlier certificates stay in use, also before the first connection.
            spoil("stage/a")
            assert await ask(of(authority, "gateway/g"), spoilt="gateway/g") == b"answered"
            authority.issue("gateway/g")
            authority.issue("stage/a")
            assert (await refused(ask(of(authority, "stage/b")))).reason is Reason.PEER_NOT_ALLOWED
            assert (await refused(ask(None))).reason is Reason.UNREACHABLE
            assert (await refused(ask(of(other, "gateway/g")))).reason is Reason.TLS_FAILED
            gateway = of(authority, "gateway/g")
            assert await serial_http(address, gateway) == number(authority.files("stage/a").cert)
            renewed = authority.issue("stage/a")
            assert await serial_http(address, gateway) == number(renewed.cert)
        finally:
            await port.stop()


async def serial_http(address: str, tls: Tls) -> int:
    host, at = split(address)
    _, writer = await asyncio.open_connection(
        host, at, ssl=tls.client_context(), server_hostname=tls.peer_name(Role.STAGE)
    )
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    writer.close()
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_openssl_verifies_a_coordinator_by_its_host(authority: Authority, tmp_path: Path) -> None:
    config = CoordinatorConfig(tmp_path / "journal.db", "127.0.0.1:0", tls=of(authority, "coordinator"))
    server = CoordinatorServer(config)
    await server.start()
    files = authority.ensured("client/alice")
    command = ["openssl", "s_client", "-connect", server.address, "-alpn", "h2", "-CAfile", str(files.ca),
               "-cert", str(files.cert), "-key", str(files.key), "-verify_return_error",
               "-verify_ip", "127.0.0.1"]  # fmt: skip
    try:
        done = await asyncio.to_thread(subprocess.run, command, input=b"", capture_output=True, timeout=20, check=False)
    finally:
        await server.stop()
    assert done.returncode == 0, done.stderr.decode()
    assert b"Verify return code: 0 (ok)" in done.stdout
    assert b"subject=CN = rlctl://lab/coordinator" in done.stdout
