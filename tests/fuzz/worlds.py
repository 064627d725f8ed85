"""Fleets with every server of rlctl in front, the targets in them, and what must hold between batches.

In the world ``owner`` every caller has all rights: inputs may change the fleet, which must return to service. In the
world ``viewer`` callers may only read: no input may change anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from rlctl.cli.web.server import WebServer
from rlctl.contract.scopes import Grant, Scope
from rlctl.gateway import dialects
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.channel import open_channel
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import rollout_pb2, stage_pb2, trainer_pb2, worker_pb2
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY, STAGE_STATE_READY, STAGE_STATE_STALE, RequestHeader, Target
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_UNSPECIFIED
from rlctl.v1.verbs_pb2 import (
    ContinueGenerationRequest,
    ResumeMemoryRequest,
    UpdateWeightsFromDiskRequest,
)
from tests.fuzz import servers, words
from tests.fuzz.http_client import Client
from tests.fuzz.http_requests import Route
from tests.fuzz.targets import Fault, HttpTarget, RpcTarget
from tests.fuzz.targets import Target as FuzzTarget

FLEET_TOKEN, VIEWER_TOKEN = "token of the fleet", "token of a viewer"
ANSWERS_S = 10.0
"""Longest time of a health check, and of a fleet to return to service."""

SLOTS = ("a", "b")

REFLECTION: Any = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
HEALTH: Any = health_pb2.DESCRIPTOR.services_by_name["Health"]


def contract() -> dict[str, Any]:
    """Return every service of the contract by name."""
    files = (
        rpc.DESCRIPTOR,
        stage_pb2.DESCRIPTOR,
        worker_pb2.DESCRIPTOR,
        rollout_pb2.DESCRIPTOR,
        trainer_pb2.DESCRIPTOR,
    )
    return {name: service for file in files for name, service in file.services_by_name.items()}


class World:
    """A fleet of stages a and b with one and two ranks, and the servers in front."""

    name = ""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.targets: list[FuzzTarget] = []
        self._stack = contextlib.AsyncExitStack()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._clients: list[Client] = []
        self._gateways: dict[str, GatewayServer] = {}

    async def start(self) -> None:
        """Start every server and make the targets."""
        for text in ("one", "two"):
            (self._directory / text).mkdir(parents=True)
            (self._directory / text / "weights.txt").write_text(text)
        self._checkpoint = str(self._directory / "one")
        other = str(self._directory / "two")
        self._words = words.of_messages(self._checkpoint, other)
        self._fields = words.of_bodies(self._checkpoint, other)
        specs = [StageSpec(slot, self._checkpoint, tp_size=ranks) for slot, ranks in zip(SLOTS, (1, 2), strict=True)]
        fleet = InProcessFleet(
            self._directory / "journal.db",
            specs,
            token=self.token,
            access_file=self._access_file(),
            metrics="127.0.0.1:0",
        )
        self.fleet = await self._stack.enter_async_context(fleet)
        self._stack.push_async_callback(self._close)
        await self._add_rpcs()
        await self._add_gateways()
        await self._add_pages()

    async def stop(self) -> None:
        """Stop every server."""
        await self._stack.aclose()

    @property
    def token(self) -> str | None:
        """The fleet's own token."""
        return None

    def _access_file(self) -> str:
        return ""

    async def _close(self) -> None:
        self.forget_connections()
        for channel in self._channels.values():
            await channel.close()

    def forget_connections(self) -> None:
        """Close the idle HTTP connections."""
        for client in self._clients:
            client.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, None)
        return self._channels[address]

    # Targets.

    def _add(self, service: Any, address: str, token: str | None, refused: Iterable[str] = ()) -> None:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        for method in service.methods:
            target = RpcTarget(
                self.name, method, self._channel(address), self._words, metadata, refused=method.name in refused
            )
            self.targets.append(target)

    async def _add_rpcs(self) -> None:
        raise NotImplementedError

    async def _add_gateways(self) -> None:
        for dialect in dialects.names():
            config = GatewayConfig(
                self.fleet.server.address,
                dialect=dialect,
                token=self.token,
                access_file=self._access_file(),
                generation=Settings(timeout_s=2.0),
                drain_s=0.5,
                metrics="127.0.0.1:0",
            )
            server = GatewayServer(config)
            self._stack.push_async_callback(server.stop)
            await server.start()
            self._gateways[dialect] = server
            routes = [(method, row.path) for row in server.dialect.routes for method in row.methods.split()]
            self._add_http(dialect, server.address, dict.fromkeys([*routes, ("GET", "/nowhere")]))
            self._add_http(f"{dialect}-metrics", server.metrics_address, [("GET", "/metrics")], typed=False)

    async def _add_pages(self) -> None:
        web = WebServer(self.fleet.server)
        url = await web.start("127.0.0.1:0")
        self._stack.push_async_callback(web.stop)
        address = url.removeprefix("http://").rstrip("/")
        self._add_http("web", address, [("GET", "/"), ("GET", "/api/state"), ("GET", "/operations/{id}")], typed=False)
        self._add_http("metrics", self.fleet.server.metrics_address, [("GET", "/metrics")], typed=False)
        stage = self.fleet.stages[SLOTS[0]]
        self._add_http("stage-metrics", stage.metrics_address, [("GET", "/metrics")], typed=False)
        for name, bound, routes in await self._stack.enter_async_context(
            servers.data_ports(self.token, self._access_file())
        ):
            self._add_http(name, bound, [(route.method, route.path) for route in routes])

    def _add_http(self, server: str, address: str, routes: Iterable[tuple[str, str]], *, typed: bool = True) -> None:
        client = Client(address)
        self._clients.append(client)
        for method, path in routes:
            route = Route(
                method, path, words.bodies_of(path), ("timeout", "mode", "tags", "session_id", "level", "url")
            )
            self.targets.append(
                HttpTarget(self.name, server, route, client, self._fields, self._headers(), typed=typed)
            )

    def _headers(self) -> Mapping[str, str]:
        return {}

    # Checks.

    async def check(self) -> None:
        """Check the servers and the fleet after a batch. Raises :class:`Fault`."""
        try:
            async with asyncio.timeout(ANSWERS_S):
                for address, channel in self._channels.items():
                    stub: Any = health_pb2_grpc.HealthStub(channel)
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWERS_S)
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        raise Fault(f"{address} does not serve")
                for client in self._clients:
                    await client.alive()
        except (TimeoutError, grpc.aio.AioRpcError, OSError) as error:
            raise Fault(f"a server does not answer: {error!r}") from None


class OwnersWorld(World):
    """A fleet without tokens. Stage c and its worker have no coordinator: any epoch may command them."""

    name = "owner"

    async def _add_rpcs(self) -> None:
        services = contract()
        self._add(services["CoordinatorService"], self.fleet.server.address, None)
        self._add(HEALTH, self.fleet.server.address, None)
        self._add(REFLECTION, self.fleet.server.address, None)
        self._add(services["RolloutService"], self.fleet.stages["b"].rollout_address, None)
        self._lone = servers.Lone(self._checkpoint)
        await self._start_lone()
        self._stack.push_async_callback(self._stop_lone)
        address, token = await self._stack.enter_async_context(servers.lead(3))
        self._add(services["TrainerService"], address, token)

    async def _add_pages(self) -> None:
        await super()._add_pages()
        address, routes = await self._stack.enter_async_context(servers.sidecar())
        self._add_http("sidecar", address, routes)

    async def _start_lone(self) -> None:
        services = contract()
        await self._lone.start()
        self.targets = [target for target in self.targets if not target.name.startswith(_OF_LONE)]
        self._add(services["StageService"], self._lone.stage.address, None)
        self._add(services["WorkerService"], self._lone.worker_address, None)

    async def _stop_lone(self) -> None:
        for address in (self._lone.stage.address, self._lone.worker_address):
            await self._channels.pop(address).close()
        await self._lone.stop()

    async def check(self) -> None:
        """Besides: the fleet returns to service with one version, and a new stage c starts."""
        await super().check()
        await self._stop_lone()
        await self._start_lone()
        try:
            async with asyncio.timeout(3 * ANSWERS_S):
                await self._restore()
        except TimeoutError:
            raise Fault(f"the fleet does not return to service: {self._state()}") from None
        self._compare_weights()

    def _state(self) -> str:
        coordinator = self.fleet.server.coordinator
        running = [(each.verb, each.operation_id) for each in coordinator.operations.running()]
        heals = [
            run.operation.error.message
            for run in coordinator.operations.newest_first("HealStage", OPERATION_STATE_UNSPECIFIED)[:4]
        ]
        return f"running {running}, last heals {heals}, {coordinator.roster.fleet()}"

    async def _restore(self) -> None:
        """Undo what inputs were allowed to do."""
        stub, server = self.fleet.stub, self.fleet.server.coordinator
        while True:
            for operation in server.operations.running():
                cancel = rpc.CancelOperationRequest(operation_id=operation.operation_id)
                await _tolerate(stub.CancelOperation(cancel, timeout=ANSWERS_S))
            slots = server.roster.slots
            for name in [name for name in slots if name not in SLOTS and not slots[name].record.retired]:
                await _tolerate(stub.DeregisterStage(rpc.DeregisterStageRequest(slot=name, force=True)))
            await _tolerate(stub.SetHealing(rpc.SetHealingRequest(model="actor")))
            await _tolerate(stub.SetMinHealthy(rpc.SetMinHealthyRequest(model="actor")))
            await _tolerate(stub.SetStageEnabled(rpc.SetStageEnabledRequest(slots=SLOTS, enabled=True)))
            await _tolerate(stub.AdmitSlots(rpc.AdmitSlotsRequest(slots=SLOTS)))
            header = RequestHeader(target=Target(slots=SLOTS))
            for stage in server.roster.fleet().stages:
                for pause in stage.adapter_pauses:
                    await _tolerate(
                        stub.ContinueGeneration(ContinueGenerationRequest(header=header, adapter=pause.adapter))
                    )
            await _tolerate(stub.ResumeMemory(ResumeMemoryRequest(header=header)))
            await _tolerate(stub.HealStage(rpc.HealStageRequest(), timeout=ANSWERS_S))
            if all(stage.state in _WITHOUT_VERSION for stage in server.roster.fleet().stages):
                # No stage has the weights of a version without a checkpoint: only a new version ends that.
                publish = UpdateWeightsFromDiskRequest(model_path=self._checkpoint)
                await _tolerate(stub.UpdateWeightsFromDisk(publish, timeout=ANSWERS_S))
            await _tolerate(stub.ContinueGeneration(ContinueGenerationRequest(header=header)))
            stages = server.roster.fleet().stages
            serving = [stage.registration.slot for stage in stages if _serves(stage)]
            if sorted(serving) == sorted(SLOTS) and not server.operations.running():
                return
            await asyncio.sleep(0.2)

    def _compare_weights(self) -> None:
        """Check that both stages serve the latest version, with equal weights at every rank."""
        fleet = self.fleet.server.coordinator.roster.fleet()
        latest = next(model.latest for model in fleet.models if model.name == "actor")
        versions = {stage.registration.slot: stage.report.weight_version for stage in fleet.stages if stage.routable}
        if any(version != latest for version in versions.values()):
            raise Fault(f"stages serve {versions}, and the latest version is {latest}")
        texts = {slot: stage._engine.weights for slot, stage in self.fleet.stages.items()}  # type: ignore[attr-defined]
        if len(set(texts.values())) > 1:
            raise Fault(f"stages of one version have different weights: {texts}")


_KEPT = ("fleet", "slot", "model", "operation", "update", "pause", "key", "admitted", "forgotten")
"""Kinds of records of the journal that no caller without rights may change."""

_WITHOUT_VERSION = (STAGE_STATE_STALE, STAGE_STATE_DIRTY)

_OF_LONE = ("owner/StageService", "owner/WorkerService")


def _serves(stage: Stage) -> bool:
    return stage.state == STAGE_STATE_READY and stage.routable


async def _tolerate(call: Any) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await call


class ViewersWorld(World):
    """A fleet with an access file, called with the token of a viewer."""

    name = "viewer"

    @property
    def token(self) -> str | None:
        return FLEET_TOKEN

    def _access_file(self) -> str:
        path = self._directory / "access.json"
        if not path.exists():
            viewer = Entry("viewer", (Grant(Scope.VIEWER),), (TokenHash(hash_of(VIEWER_TOKEN), 0.0),))
            access_file.write(path, {"viewer": viewer})
        return str(path)

    def _headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {VIEWER_TOKEN}"}

    async def start(self) -> None:
        """Besides: remember the fleet."""
        await super().start()
        self._before = self._fingerprint()

    async def _add_rpcs(self) -> None:
        services, fleet = contract(), self.fleet
        stage = fleet.stages["b"]
        self._add(services["CoordinatorService"], fleet.server.address, VIEWER_TOKEN)
        closed = {
            "StageService": stage.address,
            "WorkerService": stage.config.followers[0],
            "RolloutService": stage.rollout_address,
        }
        for name, address in closed.items():
            self._add(services[name], address, VIEWER_TOKEN, [method.name for method in services[name].methods])
        address, _ = await self._stack.enter_async_context(servers.lead(3))
        self._add(services["TrainerService"], address, VIEWER_TOKEN, ["Join"])

    async def check(self) -> None:
        """Besides: the fleet is as before."""
        await super().check()
        now = self._fingerprint()
        if now != self._before:
            differing = {name: (self._before[name], now[name]) for name in now if now[name] != self._before[name]}
            raise Fault(f"callers without rights have changed the fleet: {differing}")

    def _fingerprint(self) -> dict[str, Any]:
        """Return what no caller without rights may change: the journal but its audit, and every stage's state."""
        coordinator = self.fleet.server.coordinator
        journal = hashlib.sha256()
        for kind in _KEPT:
            for key, body in sorted(self.fleet.server._journal.read(kind)):
                journal.update(f"{kind} {key} ".encode() + body)
        stages = {}
        for stage in coordinator.roster.fleet().stages:
            stage.ClearField("last_heard")
            stage.report.ClearField("grant_number")
            stages[stage.registration.slot] = stage.SerializeToString(deterministic=True)
        engines = {slot: stage._engine.weights for slot, stage in self.fleet.stages.items()}  # type: ignore[attr-defined]
        return {"journal": journal.hexdigest(), "stages": stages, "engines": engines}


WORLDS: Mapping[str, Callable[[Path], World]] = {"owner": OwnersWorld, "viewer": ViewersWorld}
