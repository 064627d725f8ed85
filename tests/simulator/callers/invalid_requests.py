"""A caller of invalid and unauthorised requests: refused with a reason at any time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message

from rlctl.command_stream.commander import Commander
from rlctl.contract.errors import RlctlError
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    PAUSE_MODE_RETRACT,
    TRANSPORT_DISK,
    TRANSPORT_TORCH_NCCL,
    VERIFICATION_LEVEL_PROBE,
    WEIGHT_SELECTOR_DRAFT,
    Fence,
    RequestHeader,
    Target,
    WeightVersion,
)
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING
from rlctl.v1.rollout_pb2 import AbortRequest, GenerateRequest
from tests.simulator.callers.operators_and_clients import Caller
from tests.simulator.ports.virtual_time import Node, SimClock
from tests.simulator.processes.coordinator import COORDINATOR, FOREIGN_TOKEN
from tests.simulator.processes.fleet import Fleet
from tests.simulator.processes.stage import StageHost

CALL_S = 20.0
NOBODYS = 10**6
"""An unused incarnation: a stage reports the incarnation that its commander states."""


class Curious(Caller):
    """Sends such requests at drawn times."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        super().__init__(fleet, node)
        self._reserved: dict[str, str] = {}
        """Request ids of this caller's keys, at the first use of each key."""

    async def act(self, chance: random.Random) -> None:
        """Do one of the works, several times."""
        works: tuple[Callable[[random.Random], Any], ...] = (
            self._ask_wrongly,
            self._ask_wrongly,
            self._ask_whether,
            self._watch,
            self._follow,
            self._override,
            self._intrude,
            self._use_rollouts,
            self._adopt,
            self._impersonate,
        )
        work = chance.choice(works)
        for _ in range(chance.randint(1, 6)):
            with contextlib.suppress(RlctlError):
                await work(chance)
            await asyncio.sleep(chance.uniform(0, 2))

    def _model(self, chance: random.Random) -> str:
        return chance.choice(sorted(self.fleet.models))

    def _slot(self, chance: random.Random) -> str:
        return chance.choice(sorted(self.fleet.stages))

    async def _refused(self, method: str, request: Message) -> None:
        """Report a violation unless the request is refused."""
        with contextlib.suppress(RlctlError):
            answer = await self.sim.network.call(self.node, COORDINATOR, method, request, CALL_S)
            if getattr(answer, "state", OPERATION_STATE_OK) == OPERATION_STATE_OK:
                self.sim.observer.broken("I5", f"{method} was not refused: {request}")

    # Invalid requests.

    async def _ask_wrongly(self, chance: random.Random) -> None:
        model = self._model(chance)
        updates = self._wrong_updates(model)
        calls = self._wrong_calls(model, self._slot(chance))
        if chance.random() < 0.5:
            await self._refused("BeginWeightUpdate", chance.choice(updates))
        else:
            await self._refused(*chance.choice(calls))

    def _wrong_updates(self, model: str) -> list[u.BeginWeightUpdateRequest]:
        header = RequestHeader(request_id=self.sim.world.new_id())

        def begin(options: v.UpdateOptions | None = None, **fields: Any) -> u.BeginWeightUpdateRequest:
            trainer = u.Trainer(name="curious", incarnation=10**6, boot_id="curious")
            path = u.DATA_PATH_BROADCAST
            given: dict[str, Any] = {"model": model, "version": "x", "path": path, "trainer": trainer}
            return u.BeginWeightUpdateRequest(header=header, options=options, **{**given, **fields})

        staged, rolling = v.APPLY_MODE_STAGED, u.RolloutStrategy(max_unavailable=1)
        retract = v.UpdateOptions(pause=PAUSE_MODE_RETRACT)
        stay = v.UpdateOptions(pause=PAUSE_MODE_RETRACT, after=v.AFTER_UPDATE_STAY_PAUSED)
        return [
            begin(num_sources=10**6),
            begin(model="nobody"),
            begin(v.UpdateOptions(quorum=99)),
            begin(kind=v.UPDATE_KIND_DELTA),
            begin(kind=v.UPDATE_KIND_DELTA, base=WeightVersion(label="another")),
            begin(stay, kind=v.UPDATE_KIND_ADAPTER, adapter="math"),
            begin(retract, kind=v.UPDATE_KIND_ADAPTER, adapter="math", rollout=rolling),
            begin(apply=staged),
            begin(stay, rollout=rolling),
            begin(stay, apply=staged, rollout=rolling),
            begin(path=u.DATA_PATH_IPC),
            begin(transports=[TRANSPORT_DISK]),
            begin(transports=[TRANSPORT_TORCH_NCCL]),
            begin(v.UpdateOptions(selector=WEIGHT_SELECTOR_DRAFT)),
            begin(v.UpdateOptions(verify=VERIFICATION_LEVEL_PROBE)),
        ]

    def _wrong_calls(self, model: str, slot: str) -> list[tuple[str, Message]]:
        everybody, named = RequestHeader(target=Target(model=model)), RequestHeader(target=Target(slots=[slot]))
        outsider = RequestHeader(fence=Fence(update_id="none"))
        others = [other for other in self.fleet.models if other != model]
        foreign = Target(model=model, slots=[self.fleet.models[others[0]][0] if others else "nobody"])
        registration = self.fleet.stages[slot].stage
        newer = StageRegistration()
        if registration is not None:
            newer.CopyFrom(registration.registration)
        newer.contract_version += 5
        wrong: list[tuple[str, Message]] = [
            ("Verb", v.FlushCacheRequest(header=RequestHeader(target=Target(model="nobody")))),
            ("Verb", v.FlushCacheRequest(header=RequestHeader(target=Target(slots=["nobody"])))),
            ("Verb", v.FlushCacheRequest(header=RequestHeader(target=Target(stages=["nobody"])))),
            ("Verb", v.FlushCacheRequest(header=RequestHeader(target=foreign))),
            ("Verb", v.UpdateWeightsFromDistributedRequest(header=everybody)),
            ("Verb", v.UpdateWeightsFromDistributedRequest(header=outsider)),
            ("Verb", v.FlushCacheRequest(header=outsider)),
            ("Verb", v.LoadAdapterRequest(header=named, name="math", path="x")),
            ("Verb", v.UnloadAdapterRequest(header=everybody, name="nobody")),
            ("Verb", v.UpdateWeightsFromDiskRequest(header=everybody, model_path="nowhere")),
            ("Verb", v.PullWeightsRequest(header=everybody)),
            ("JoinWeightUpdate", u.JoinWeightUpdateRequest(update_id="none")),
            ("RetryWeightUpdate", u.RetryWeightUpdateRequest(update_id="none", failed_attempt=1)),
            ("CommitWeightUpdate", u.CommitWeightUpdateRequest(update_id="none")),
            ("RenewLease", u.RenewLeaseRequest(update_id="none")),
            ("GetOperation", rpc.GetOperationRequest(operation_id="none")),
            ("GetFleet", rpc.GetFleetRequest(model="nobody")),
            ("RegisterStage", rpc.RegisterStageRequest(registration=newer)),
            ("DeregisterStage", rpc.DeregisterStageRequest(slot=slot, boot_id="another")),
            ("DeregisterStage", rpc.DeregisterStageRequest(slot="nobody")),
            ("SetStageEnabled", rpc.SetStageEnabledRequest(slots=["nobody"])),
            ("TakeOverStages", rpc.TakeOverStagesRequest(slots=["nobody"])),
            ("HealStage", rpc.HealStageRequest(slots=["nobody"])),
        ]
        if others:
            wrong.append(("Verb", v.LoadAdapterRequest(name="math", path="x")))
            wrong.append(("Verb", v.UpdateWeightsFromDiskRequest(model_path="x")))
        return wrong

    # Requests that change nothing.

    async def _ask_whether(self, chance: random.Random) -> None:
        header = RequestHeader(validate_only=True, target=Target(model=self._model(chance)))
        update = u.BeginWeightUpdateRequest(header=header, model=header.target.model, version="x")
        slot = self._slot(chance)
        asked: list[tuple[str, Message]] = [
            ("Verb", v.PauseGenerationRequest(header=header, mode=PAUSE_MODE_RETRACT)),
            ("Verb", v.UpdateWeightsFromDistributedRequest(header=header)),
            ("Verb", v.UpdateWeightsFromDiskRequest(header=header, model_path="x")),
            ("Verb", v.LoadAdapterRequest(header=header, name="math", path="x")),
            ("BeginWeightUpdate", update),
            ("HealStage", rpc.HealStageRequest(header=header, slots=[slot])),
            ("HealStage", rpc.HealStageRequest(header=header)),
            ("SetStageEnabled", rpc.SetStageEnabledRequest(header=header, slots=[slot])),
            ("TakeOverStages", rpc.TakeOverStagesRequest(header=header, slots=[slot])),
            ("ListOperations", rpc.ListOperationsRequest(page_size=3, verb="HealStage")),
        ]
        method, request = chance.choice(asked)
        answer = await self.sim.network.call(self.node, COORDINATOR, method, request, CALL_S)
        if method == "ListOperations" and answer.next_page_token:
            following = rpc.ListOperationsRequest(page_size=3, page_token=answer.next_page_token)
            await self.call("ListOperations", following, CALL_S)

    async def _follow(self, chance: random.Random) -> None:
        """Follow the fleet like a router's list of stages: confirm changes, or confirm late."""
        model = chance.choice(("", self._model(chance)))
        request = rpc.WatchFleetRequest(model=model, watch_id=f"router {model}")
        watching = asyncio.ensure_future(self.sim.network.call(self.node, COORDINATOR, "WatchFleet", request, CALL_S))
        try:
            for _ in range(4):
                await asyncio.sleep(chance.uniform(0.1, 1.2))
                shown = await self.call("GetFleet", rpc.GetFleetRequest(model=model), CALL_S)
                confirm = rpc.ConfirmFleetRequest(watch_id=request.watch_id, revision=shown.revision)
                with contextlib.suppress(RlctlError):  # the revision may not have been sent yet
                    await self.sim.network.call(self.node, COORDINATOR, "ConfirmFleet", confirm, CALL_S)
        finally:
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, chance: random.Random) -> None:
        await self.call("WatchFleet", rpc.WatchFleetRequest(model=chance.choice(("", self._model(chance)))), CALL_S)
        listed = await self.call("ListOperations", rpc.ListOperationsRequest(page_size=2), CALL_S)
        for operation in listed.operations:
            await self.call("WatchOperation", rpc.WatchOperationRequest(operation_id=operation.operation_id), CALL_S)
            await self.call("GetOperation", rpc.GetOperationRequest(operation_id=operation.operation_id), CALL_S)
        await self._reserve(chance)

    async def _reserve(self, chance: random.Random) -> None:
        """Check a key: it keeps its request id under every coordinator, and is refused with a different body."""
        key = f"key-{chance.randint(1, 3)}"
        request = rpc.ReserveRequestIdRequest(key=key, body_sha256=bytes(32))
        answer = await self.call("ReserveRequestId", request, CALL_S)
        if (first := self._reserved.setdefault(key, answer.request_id)) != answer.request_id:
            self.sim.observer.broken("I2", f"{key} stands for {answer.request_id}, not for {first} any more")
        await self._refused("ReserveRequestId", rpc.ReserveRequestIdRequest(key=key, body_sha256=b"x" * 32))

    # Requests against foreign updates and stages.

    async def _override(self, chance: random.Random) -> None:
        """Interfere with a trainer's open update: wrong tokens are refused, an operator may abort the update."""
        model = self._model(chance)
        shown = await self.call("GetFleet", rpc.GetFleetRequest(model=model), CALL_S)
        update_id = shown.models[0].update_id
        if not update_id:
            return
        foreign = u.CommitWeightUpdateRequest(update_id=update_id, fencing_token=FOREIGN_TOKEN)
        with contextlib.suppress(RlctlError):  # whether a refusal is due depends on the time
            await self.sim.network.call(self.node, COORDINATOR, "CommitWeightUpdate", foreign, CALL_S)
        await self._refused("RenewLease", u.RenewLeaseRequest(update_id=update_id, fencing_token=FOREIGN_TOKEN))
        await self._refused("JoinWeightUpdate", u.JoinWeightUpdateRequest(update_id=update_id, source=99))
        inside = RequestHeader(fence=Fence(update_id=update_id))
        reset = v.CHECK_ACTION_RESET_TENSORS
        steps: list[tuple[str, Message]] = [
            ("Verb", v.CheckWeightsRequest(header=inside, shadow=True)),
            ("Verb", v.CheckWeightsRequest(header=inside, shadow=True, action=reset)),
            ("Verb", v.CheckWeightsRequest(header=inside, per_tensor=True)),
            ("Verb", v.FlushCacheRequest(header=inside)),
            ("Verb", v.UpdateWeightsFromDistributedRequest(header=inside)),
            ("DeregisterStage", rpc.DeregisterStageRequest(slot=self._absent(model))),
            ("CommitWeightUpdate", u.CommitWeightUpdateRequest(update_id=await self._ended_operation())),
            (
                "RetryWeightUpdate",
                u.RetryWeightUpdateRequest(update_id=update_id, failed_attempt=9, fencing_token=FOREIGN_TOKEN),
            ),
        ]
        with contextlib.suppress(RlctlError):
            await self.sim.network.call(self.node, COORDINATOR, *chance.choice(steps), CALL_S)
        if chance.random() < 0.3:
            await self.call("AbortWeightUpdate", u.AbortWeightUpdateRequest(update_id=update_id), 60.0)

    def _absent(self, model: str) -> str:
        """Return a slot of the model without a running stage, or "nobody"."""
        slots = self.fleet.models[model]
        return next((slot for slot in slots if not self.fleet.stages[slot].alive), "nobody")

    async def _ended_operation(self) -> str:
        listed = await self.call("ListOperations", rpc.ListOperationsRequest(page_size=20), CALL_S)
        ended = [each.operation_id for each in listed.operations if each.state != OPERATION_STATE_RUNNING]
        return ended[0] if ended else "none"

    async def _adopt(self, chance: random.Random) -> None:
        """Let the coordinator adopt a stage that it knows already."""
        stage = self.fleet.stages[self._slot(chance)].stage
        if stage is not None and chance.random() < 0.3:
            request = rpc.RegisterStageRequest(registration=StageRegistration(address=stage.registration.address))
            await self.sim.network.call(self.node, COORDINATOR, "Adopt", request, CALL_S)

    async def _impersonate(self, chance: random.Random) -> None:
        """Register a second process for a slot. Allowed if the present process has no link."""
        stage = self.fleet.stages[self._slot(chance)].stage
        if stage is not None:
            request = rpc.RegisterStageRequest(registration=stage.registration)
            request.registration.boot_id = self.sim.world.new_id()
            await self.sim.network.call(self.node, COORDINATOR, "RegisterStage", request, CALL_S)

    async def _intrude(self, chance: random.Random) -> None:
        """Command a stage or a follower rank without being its coordinator."""
        host = self.fleet.stages[self._slot(chance)]
        rank = chance.randrange(len(host.nodes))
        commander = Commander(await self.sim.network.dialer(self.node).dial(host.address(rank)), SimClock(self.node))
        receiving = asyncio.ensure_future(commander.run())
        try:
            attach = chance.choice(
                (
                    Attach(incarnation=NOBODYS, fleet_epoch=0, slot=host.slot),
                    Attach(incarnation=NOBODYS, fleet_epoch=1, slot=host.slot, contract_version=1),
                    Attach(incarnation=NOBODYS, fleet_epoch=10**9, slot="another", contract_version=1),
                    Attach(incarnation=NOBODYS, fleet_epoch=10**9, slot=host.slot, contract_version=99),
                    Attach(incarnation=NOBODYS, fleet_epoch=2**64 - 1, slot=host.slot, contract_version=1),
                )
            )
            try:
                async with asyncio.timeout(CALL_S):
                    await commander.attach(attach)
            except TimeoutError:
                return
            except RlctlError:
                pass
            else:
                return  # the intruder came first, and is the commander until the next attach
            if rank:
                await self._single(host, rank)
            for request in (
                v.PauseGenerationRequest(),
                v.CommitUpdateRequest(header=RequestHeader(fence=Fence(fleet_epoch=1))),
                v.PauseGenerationRequest(mode=PAUSE_MODE_RETRACT),
            ):
                await self._commanded(commander, request, chance)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _single(self, host: StageHost, rank: int) -> None:
        """Make a unary call to a follower: a single rank changes nothing."""
        body = Packed()
        body.Pack(v.PauseGenerationRequest())
        executor = host.executors.get(rank)
        if executor is not None and host.alive:
            result = await executor.execute(self.sim.world.new_id(), body, 5.0)
            if result.rank.outcome == OUTCOME_APPLIED:
                self.sim.observer.broken("I5", f"rank {rank} of {host.slot} alone was paused")

    async def _commanded(self, commander: Commander, request: Message, chance: random.Random) -> None:
        body = Packed()
        body.Pack(request)
        if chance.random() < 0.2:
            body = chance.choice((Packed(), Packed(type_url=body.type_url, value=b"\xff\xff")))
        issued = commander.issue("intruder/1", "intruder", body, self.node.loop.time() + 5.0)
        done, _ = await asyncio.wait({issued.result}, timeout=5.0)
        result = issued.result.result() if done and issued.result.exception() is None else None
        if result is not None and OUTCOME_APPLIED in (result.stage.outcome, result.rank.outcome):
            self.sim.observer.broken("I5", f"somebody without an epoch did {type(request).__name__}")

    # The rollout port.

    async def _use_rollouts(self, chance: random.Random) -> None:
        """Send whole requests, aborts and invalid requests."""
        host = self.fleet.stages[self._slot(chance)]
        whole = GenerateRequest(rid=self.sim.world.new_id())
        whole.sampling_params.max_new_tokens = chance.randint(1, 20)
        if chance.random() < 0.8:
            whole.input_ids.ids.append(1)
        if chance.random() < 0.2:
            whole.model = "nobody"
        if not host.alive:
            return
        host.node.start(_quietly(host, "generate", whole))
        await asyncio.sleep(chance.uniform(0, 1))
        if chance.random() < 0.5:
            abort = chance.choice((AbortRequest(abort_all=True), AbortRequest(rids=[whole.rid]), AbortRequest()))
            host.node.start(_quietly(host, "abort", abort))


async def _quietly(host: StageHost, method: str, request: Message) -> None:
    with contextlib.suppress(RlctlError):
        await host.call(method, request)
