"""A stage server as a process: engine, ranks, admin and rollout servers, and registration with the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.command_stream.commander import Commander
from rlctl.command_stream.executor import Executor
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Engine, EngineConfig, EngineInfo, HttpRoute, brings_ranks, engine_class
from rlctl.metrics.definitions import refuse_without_library
from rlctl.ports import SystemClock
from rlctl.runtime import server_process
from rlctl.runtime.addresses import join, refuse_unreachable, split
from rlctl.runtime.event_loops import LoopThread
from rlctl.runtime.restart_limit import Failures, RestartLimit
from rlctl.stage.generation.service import Generation, unmeasured
from rlctl.stage.relay import LocalRank, Rank, Relay, RemoteRank
from rlctl.stage.serving_state import Serving
from rlctl.stage.state_machine import Stage
from rlctl.transport import grpc
from rlctl.transport.channel import bearer, open_channel
from rlctl.transport.denials import Denials
from rlctl.transport.handlers import Bidirectional, Streaming, Unary, generic_handler
from rlctl.transport.links import GrpcDialer
from rlctl.transport.quotas import MOST_REQUESTS, Quotas
from rlctl.transport.server import GRACE_S, GrpcServer
from rlctl.transport.status import from_grpc
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.diagnosis import handshake_failure
from rlctl.transport.tls.identity import Role
from rlctl.transport.unary_verbs import admin_methods
from rlctl.v1 import common_pb2, rollout_pb2, stage_pb2
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.coordinator_pb2 import (
    DeregisterStageRequest,
    DeregisterStageResponse,
    RegisterStageRequest,
    RegisterStageResponse,
)
from rlctl.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from rlctl.v1.fleet_pb2 import EngineFailure, RankStatus, StageRegistration, StageReport
from rlctl.v1.worker_pb2_grpc import WorkerServiceStub
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.worker import Worker

if TYPE_CHECKING:
    from rlctl.stage.data_port.server import DataPort
    from rlctl.stage.metrics import StageMetrics

log = logging.getLogger(__name__)

REGISTER_S = 10.0
REGISTER_AGAIN_S = 1.0
ATTACHED_WITHIN_S = 15.0
DEREGISTER_S = 2.0
STOP_S = server_process.STOP_S - 1.0
"""Time of a stop in order. The rest is for the end of the process."""
ENGINE_STOPS_S = 5.0
"""Part of STOP_S that running calls leave to the engine, which may have processes to end."""
START_S = 1800.0
FOLLOWER_STARTS_S = 60.0
"""Seconds that a follower may be silent while its engine starts. Imports and forks block the loops of a busy host."""
RESTART_AFTER_S = 1.0
RESTART_AT_MOST_S = 60.0
LOG_LINES = 20
MOST_LOG_LINE = 500
"""Most lines of a failed engine's log in a report, and most characters of a line."""
STEADY_S = 60.0
"""An engine that ran this long restarts at once after a failure. Earlier failures are retried with growing delay."""


@dataclass(frozen=True)
class StageConfig:
    """Configuration of a stage server. Fields without an explanation are options of ``rlctl stage``.

    Attributes:
        engine_config: configuration of rank 0.
        advertise: host under which peers reach the three listeners; "": the host of the address.
        token: bearer token that guards every service and is sent to every peer.
        tls: certificate of this slot's stage; None for plain text.
        restarts: restart limit of an engine that this process can start again.
    """

    slot: str
    model: str
    engine: str
    engine_config: EngineConfig
    followers: Sequence[str] = ()
    listen: str = "127.0.0.1:0"
    rollout_listen: str = "127.0.0.1:0"
    data_listen: str = ""
    advertise: str = ""
    coordinator: str = ""
    weight_version: str = ""
    frozen: bool = False
    worker_type: str = "regular"
    token: str | None = field(default=None, repr=False)
    access_file: str = ""
    insecure: bool = False
    tls: Tls | None = None
    metrics: str = ""
    restarts: RestartLimit = field(default_factory=RestartLimit)


class StageServer:
    """Rank 0 of one engine with its servers."""

    def __init__(self, config: StageConfig) -> None:
        if config.tls is not None:
            config.tls.require(Role.STAGE, name=config.slot)
        self.config = config
        self.address = ""
        self.rollout_address = ""
        self.data_address = ""
        self._clock = SystemClock()
        self._loop = asyncio.get_running_loop()
        self._stage: Stage | None = None
        self._executor: Executor | None = None
        self._failure: RlctlError | None = None
        self._lost: dict[int, RlctlError] = {}
        """Errors of lost followers. A follower may be lost before the stage exists."""
        self._engine = self._new_engine()
        self._rollout_loop = LoopThread(f"rollout {config.slot}")
        self._tasks: list[asyncio.Task[None]] = []
        self._registering: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._started_at = 0.0
        self._pause_s = 0.0
        self._failures = 0
        self._failing_since = Timestamp()
        self._recent: Failures[Timestamp] = Failures()
        methods = admin_methods("StageService", self._commanded, self._clock, on_link_end=self._link_ended)
        service = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
        self._admin = GrpcServer(
            [(service, generic_handler(service, methods))],
            token=config.token,
            access_file=config.access_file,
            insecure=config.insecure,
            tls=config.tls,
        )
        self._rollout: GrpcServer | None = None
        self._generation: Generation | None = None
        self._quotas: Quotas | None = None
        self._data_port: DataPort | None = None
        self.metrics_address = ""
        self._metrics = self._new_metrics() if config.metrics else None

    async def start(self) -> None:
        """Bind, load, and register. Both servers answer while the engine loads, but serve nothing."""
        if self.config.coordinator:
            refuse_unreachable(self.config.coordinator, "coordinator")
        for follower in self.config.followers:
            refuse_unreachable(follower, "follower")
        self.address = self._advertised(await self._admin.start(self.config.listen))
        await self._admin.serving(False)
        if self._metrics is not None:
            self.metrics_address = self._advertised(await self._metrics.exposition.start(self.config.metrics))
        bound = await self._rollout_loop.acall(self._start_rollout())
        self.rollout_address = self._advertised(bound)
        async with asyncio.timeout(START_S):
            await self._start_engine()
        await self._admin.serving(True)
        self._register()

    async def stop(self) -> None:
        """Deregister, let running calls finish, and stop the engine, within STOP_S in all."""
        until = self._clock.now() + STOP_S
        tasks = [*self._tasks, *(task for task in (self._registering, self._restarting) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._deregister()
        if self._metrics is not None:
            await self._metrics.exposition.stop()
        await self._rollout_loop.acall(self._stop_rollout(self._grace_s(until - ENGINE_STOPS_S)))
        try:
            async with asyncio.timeout(max(until - self._clock.now(), 0.0)):
                await self._engine.stop()
        except TimeoutError:
            log.warning("%s: the engine did not stop in time and may still run", self.config.slot)
        if self._stage is not None:
            await self._stage.leave()
        await self._admin.stop(self._grace_s(until))
        await asyncio.to_thread(self._rollout_loop.stop)

    def _grace_s(self, until: float) -> float:
        """Return the time for running calls to finish."""
        return min(max(until - self._clock.now(), 0.0), GRACE_S)

    def _new_metrics(self) -> StageMetrics:
        refuse_without_library()
        from rlctl.stage.metrics import StageMetrics  # loads prometheus_client

        config = self.config
        return StageMetrics(config.model, config.slot, self._serving, self._clock, config.tls)

    async def _start_rollout(self) -> str:
        denials, metrics = Denials(), self._metrics
        quotas = Quotas(denials, metrics.refused if metrics else None, most=MOST_REQUESTS)
        measure = metrics.request if metrics else unmeasured
        generation = Generation(lambda: self._engine, self._serving, SystemClock(), quotas, measure)
        if metrics:
            metrics.exposition.watch_loop("rollout")
        self._generation, self._quotas = generation, quotas
        service = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
        methods: dict[str, Unary | Streaming | Bidirectional] = {
            "Generate": generation.generate,
            "GenerateStream": generation.stream,
            "GenerateMany": generation.many,
            "Abort": generation.abort,
        }
        handler = generic_handler(service, methods, cancellable=True)
        config = self.config
        self._rollout = GrpcServer(
            [(service, handler)],
            token=config.token,
            access_file=config.access_file,
            insecure=config.insecure,
            tls=config.tls,
            denials=denials,
        )
        return await self._rollout.start(self.config.rollout_listen)

    async def _stop_rollout(self, grace_s: float) -> None:
        stops = []
        if self._rollout is not None and self._generation is not None:
            self._generation.close()
            stops.append(self._rollout.stop(grace_s))
        if self._data_port is not None:
            stops.append(self._data_port.stop(grace_s))
        await asyncio.gather(*stops)

    async def _start_data_port(self, routes: Sequence[HttpRoute]) -> str:
        from rlctl.stage.data_port.server import DataPort  # aiohttp is installed with server engines only

        config = self.config
        port = DataPort(
            lambda: self._engine,
            self._serving,
            SystemClock(),
            quotas=self._quotas,
            token=config.token,
            access_file=config.access_file,
            insecure=config.insecure,
            tls=config.tls,
        )
        address = config.rollout_listen
        host = "127.0.0.1" if address.startswith("unix:") else split(address, "rollout_listen")[0]
        bound = await port.start(config.data_listen or join(host, 0), routes)
        self._data_port = port
        return bound

    async def _start_engine(self) -> None:
        setup, self._lost = self._engine.setup(), {}
        followers = await asyncio.gather(*(self._dial(index, a) for index, a in enumerate(self.config.followers)))
        attach = Attach(slot=self.config.slot, contract_version=CONTRACT_VERSION, engine_setup=setup)
        joining = asyncio.gather(*(commander.attach(attach) for commander in followers))
        info, joined = await asyncio.gather(self._engine.start(setup), joining)
        if info.http_routes and not self.data_address:
            bound = await self._rollout_loop.acall(self._start_data_port(info.http_routes))
            self.data_address = self._advertised(bound)
        workers = list(info.layout.workers)
        owns_ranks = brings_ranks(self.config.engine)
        worker = Worker(self._engine, workers[0], self._clock, others=workers[1:] if owns_ranks else ())
        ranks: list[Rank] = [
            LocalRank(worker, self._clock),
            *([] if owns_ranks else map(RemoteRank, workers[1:], followers)),
        ]
        if owns_ranks:
            pids = [os.getpid()] * len(workers)  # the process that answers for the ranks
            hosts = [self.config.engine_config.node, *(each.report.ranks[0].coordinates.node for each in joined)]
            for place in workers:
                place.node = hosts[place.rank * len(hosts) // len(workers)]
        else:
            pids = [os.getpid(), *(each.report.ranks[0].pid for each in joined)]
        statuses = [RankStatus(coordinates=w, alive=True, pid=pid) for w, pid in zip(workers, pids, strict=True)]
        stage = Stage(
            self._registration(info),
            self._engine,
            Relay(self._engine, ranks, workers, self._clock),
            statuses,
            self._clock,
        )
        self._started_at = self._clock.now()
        self._worker = worker
        self._stage, self._executor = stage, Executor(stage, self._clock)
        for rank, each in enumerate(joined, start=1):
            self._follower_reported(rank, each.report)
        for rank, error in self._lost.items():
            self._follower_lost(rank, error)
        if self._failure is not None:
            self._rank_zero_failed(self._engine, self._failure)

    async def _dial(self, index: int, address: str) -> Commander:
        rank = index + 1
        link = await GrpcDialer(WorkerServiceStub, self.config.token, self.config.tls, Role.WORKER).dial(address)
        commander = Commander(
            link,
            self._clock,
            on_report=lambda report: self._follower_reported(rank, report),
            starting_s=FOLLOWER_STARTS_S,
        )

        async def keep() -> None:
            with contextlib.suppress(RlctlError):
                await commander.run()
            self._follower_lost(rank, Reason.LINK_LOST.error("the follower's process is gone, or stopped"))

        self._tasks.append(asyncio.create_task(keep()))
        return commander

    def _follower_reported(self, rank: int, report: StageReport) -> None:
        status = report.ranks[0]
        if self._stage is not None and not brings_ranks(self.config.engine):
            self._stage.rank_seen(rank, status.pid)
        if not status.alive:
            self._follower_lost(rank, Reason.ENGINE_FAILED.error(status.reason))

    def _follower_lost(self, rank: int, error: RlctlError) -> None:
        """Mark a rank as lost; for a server engine, a node with all of its ranks. The server ends with the node."""
        self._lost.setdefault(rank, error)
        if self._stage is None:
            return
        if brings_ranks(self.config.engine):
            self._engine.lost(error.reason.error(f"node {rank} of the server: {error.message}"))
        else:
            self._stage.rank_lost(rank, error)

    def _new_engine(self) -> Engine:
        def failed(error: RlctlError) -> None:
            self._loop.call_soon_threadsafe(self._rank_zero_failed, engine, error)

        self._failure = None
        engine = engine_class(self.config.engine)(self.config.engine_config, failed)
        return engine

    def _rank_zero_failed(self, engine: Engine, error: RlctlError) -> None:
        log.error("engine failed: %s", error)
        if engine is not self._engine:
            return
        self._failure = error  # may happen before the stage exists
        if self._stage is None:
            return
        self._worker.failure = error
        for rank in range(1 + len(self._worker.others)):
            self._stage.rank_lost(rank, error)
        if not engine.can_restart():
            self._stage.engine_failed(EngineFailure(reason=error.message, failures=1, since=self._clock.wall()))
        if engine.can_restart() and self._restarting is None:
            self._restarting = asyncio.create_task(self._restart(self._stage))

    async def _restart(self, old: Stage) -> None:
        """Start the engine again in this process, as a new incarnation without the state of the earlier incarnation."""
        if self._clock.now() - self._started_at > STEADY_S:
            self._pause_s, self._failures = 0.0, 0
        self._report_failure(old, self._failure)
        while not self._recent.exceed(self.config.restarts):
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(max(2 * self._pause_s, RESTART_AFTER_S), RESTART_AT_MOST_S)
            try:
                await self._engine.stop()
                self._engine = self._new_engine()
                async with asyncio.timeout(START_S):
                    await self._start_engine()
                break
            except Exception as error:  # noqa: BLE001 - for any error: no other process restarts the engine
                log.error("%s: the engine did not start again: %r", self.config.slot, error)
                self._report_failure(old, error)
        else:
            log.error(
                "%s: the engine has failed %d times and is not started again", self.config.slot, len(self._recent)
            )
            try:
                await self._engine.stop()
            except Exception:
                log.exception("%s: the engine did not stop", self.config.slot)
            return
        await old.leave()
        self._register()
        self._restarting = None
        if self._failure is not None:
            self._rank_zero_failed(self._engine, self._failure)

    def _report_failure(self, stage: Stage, error: Exception | None) -> None:
        """Publish the failure of the engine in the report of its stage."""
        now = self._clock.wall()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        self._recent.add(self._clock.now(), now, self.config.restarts)
        given_up = self._recent.exceed(self.config.restarts)
        reason = error.message if isinstance(error, RlctlError) else repr(error)
        retry = Timestamp(seconds=now.seconds + round(self._pause_s), nanos=now.nanos)
        lines = [line[:MOST_LOG_LINE] for line in self._engine.log_lines()][-LOG_LINES:]
        stage.engine_failed(
            EngineFailure(
                reason=reason,
                failures=len(self._recent) if given_up else self._failures,
                since=self._recent.first if given_up else self._failing_since,
                retry_time=None if given_up else retry,
                log=lines,
                given_up=given_up,
            )
        )

    def _commanded(self) -> Executor:
        if self._executor is None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.config.slot} is still loading")
        return self._executor

    def _serving(self) -> Serving:
        if self._stage is None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.config.slot} is still loading")
        return self._stage.serving

    def _link_ended(self, link: object) -> None:
        if self._stage is not None:
            self._stage.detached(link)

    def _advertised(self, bound: str) -> str:
        if not self.config.advertise or bound.startswith("unix:"):
            return bound
        return join(self.config.advertise, split(bound)[1])

    def _registration(self, info: EngineInfo) -> StageRegistration:
        capabilities = info.capabilities
        del capabilities.verbs[:]
        capabilities.verbs.extend(verb for verb in self._engine.verbs() if verb not in capabilities.unsupported)
        capabilities.fenced = info.fenced
        if (self.config.worker_type == "prefill") != (info.bootstrap is not None):
            raise Reason.FIELD_CONFLICT.error(
                f"worker type {self.config.worker_type}, and the engine "
                + (
                    "computes no prompts for decode engines"
                    if info.bootstrap is None
                    else "computes prompts for decode engines"
                ),
                field="worker_type",
                next_step="`--worker-type prefill` goes with `--option disaggregation_mode=prefill`.",
            )
        bootstrap_host, bootstrap_port = info.bootstrap or ("", 0)
        return StageRegistration(
            slot=self.config.slot,
            model=self.config.model,
            stage="main",
            address=self.address,
            rollout_address=self.rollout_address,
            boot_id=self._clock.new_id(),
            contract_version=CONTRACT_VERSION,
            capabilities=capabilities,
            layout=info.layout,
            engine=self.config.engine,
            checkpoint=info.checkpoint,
            model_digest=info.model_digest,
            weight_version=self.config.weight_version,
            frozen=self.config.frozen,
            bootstrap_host=bootstrap_host,
            bootstrap_port=bootstrap_port,
            data_address=self.data_address if info.http_routes else "",
            data_routes=[f"{route.method} {route.path}" for route in info.http_routes],
            worker_type=common_pb2.WorkerType.Value(f"WORKER_TYPE_{self.config.worker_type.upper()}"),
        )

    # Registration with the coordinator.

    def _register(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
        if self.config.coordinator:
            self._registering = asyncio.create_task(self._stay_registered())

    async def _stay_registered(self) -> None:
        """Register, and repeat while no coordinator is attached: the coordinator may have been replaced."""
        stage, logged = self._stage, ""
        assert stage is not None
        while True:
            try:
                request = RegisterStageRequest(registration=stage.registration)
                stage.home_epoch = (await self._call_coordinator("RegisterStage", request)).header.fleet_epoch
                async with asyncio.timeout(ATTACHED_WITHIN_S):
                    await stage.attached.wait()
                logged = ""
                await stage.unattached.wait()
                problem = "the coordinator's stream has ended"
            except TimeoutError:
                problem = "registered, but no coordinator attached"
            except RlctlError as error:
                problem = f"not registered: {error}"
            if problem != logged:
                log.warning("%s: %s", self.config.slot, problem)
            logged = problem
            await asyncio.sleep(REGISTER_AGAIN_S)

    async def _deregister(self) -> None:
        stage = self._stage
        if stage is None or not self.config.coordinator or not stage.incarnation:
            return
        request = DeregisterStageRequest(
            slot=self.config.slot, boot_id=stage.registration.boot_id, force=True, leaves=True
        )
        # An unreachable coordinator sees the link end.
        with contextlib.suppress(RlctlError, TimeoutError):
            async with asyncio.timeout(DEREGISTER_S):
                await self._call_coordinator("DeregisterStage", request)

    async def _call_coordinator(
        self,
        method: str,
        request: RegisterStageRequest | DeregisterStageRequest,
    ) -> RegisterStageResponse | DeregisterStageResponse:
        address, tls = self.config.coordinator, self.config.tls
        async with open_channel(address, tls, Role.COORDINATOR) as channel:
            stub = CoordinatorServiceStub(channel)
            call: Callable[..., grpc.aio.UnaryUnaryCall[object, RegisterStageResponse | DeregisterStageResponse]]
            call = getattr(stub, method)
            try:
                return await call(request, timeout=REGISTER_S, metadata=bearer(self.config.token))
            except grpc.aio.AioRpcError as error:
                failure = from_grpc(error)
                if failure.reason is Reason.UNREACHABLE:
                    failure = await handshake_failure(address, tls, Role.COORDINATOR) or failure
                raise failure from None
