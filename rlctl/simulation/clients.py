"""What uses the fleet: trainers with one or more sources, an operator, and clients that generate."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from rlctl.errors import Reason, RlctlError
from rlctl.simulation.engine import NAMES, contents, digest
from rlctl.simulation.hosts import COORDINATOR
from rlctl.times import duration
from rlctl.v1 import update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    RequestHeader,
    Target,
)
from rlctl.v1.coordinator_pb2 import HealStageRequest, SetStageEnabledRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.rollout_pb2 import GenerateRequest

if TYPE_CHECKING:
    from rlctl.simulation.fleet import Simulation
    from rlctl.simulation.world import Node

GRACE_S = 2.0
"""By how much a call may outlast its time before that counts as a broken promise."""

RETRIES = 3


class Caller:
    """Calls of a process to the coordinator, repeated under one request_id when the answer is lost."""

    def __init__(self, sim: Simulation, node: Node) -> None:
        self.sim = sim
        self.node = node
        self.random = sim.world.random

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """One logical call. Raises what the last try raised."""
        header = getattr(request, "header", None)
        if header is not None and not header.request_id and method not in ("RenewLease",):
            header.request_id = self.sim.world.new_id()
        for attempt in range(RETRIES + 1):
            started, stops = self.sim.world.now, self.node.stops
            try:
                answer = await self.sim.network.call(self.node, COORDINATOR, method, request, timeout_s)
            except RlctlError as error:
                if stops == self.node.stops:
                    self.sim.observer.took(method, self.sim.world.now - started, timeout_s + GRACE_S)
                if attempt == RETRIES or error.reason not in (
                    Reason.LINK_LOST,
                    Reason.UNREACHABLE,
                    Reason.DEADLINE_EXCEEDED,
                ):
                    raise
                await asyncio.sleep(self.random.uniform(0.05, 0.5))
                continue
            if isinstance(answer, Operation):
                self.sim.observer.answered(answer)
            if self.random.random() < 0.05 and method == "Verb":
                # A caller that did not believe its ears asks again: the same answer, and nothing is done twice.
                with contextlib.suppress(RlctlError):
                    await self.sim.network.call(self.node, COORDINATOR, method, request, timeout_s)
            return answer
        raise AssertionError("not reached")

    async def verb(self, request: Message, timeout_s: float) -> Operation:
        """One of the table's verbs."""
        request.header.timeout.CopyFrom(duration(timeout_s))  # type: ignore[attr-defined]
        answer: Operation = await self.call("Verb", request, timeout_s + 1.0)
        return answer


class Trainer(Caller):
    """Updates a model."""

    def __init__(self, sim: Simulation, model: str, incarnation: int) -> None:
        super().__init__(sim, sim.world.spawn(f"trainer-{model}-{incarnation}/{len(sim.world.nodes)}"))
        self.model = model
        self.incarnation = incarnation
        self.boot_id = sim.world.new_id()

    async def update(self, tag: str) -> None:
        """One update, from its beginning to its end or its failure."""
        sim, random = self.sim, self.random
        sources = random.randint(1, 4) if random.random() < 0.4 else 1
        begin = update_pb2.BeginWeightUpdateRequest(
            model=self.model,
            version=tag,
            num_sources=sources,
            kind=verbs_pb2.UPDATE_KIND_FULL,
            path=update_pb2.DATA_PATH_BROADCAST,
            trainer=update_pb2.Trainer(name=self.node.name, incarnation=self.incarnation, boot_id=self.boot_id),
            retries=random.choice((0, 0, 2)),
        )
        begin.lease_ttl.CopyFrom(duration(random.choice((3.0, 30.0))))
        limit = random.uniform(10, 40)
        begin.header.timeout.CopyFrom(duration(limit))
        options = begin.options
        options.pause = random.choice(
            (PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN)
        )
        options.abort_all_requests = random.random() < 0.3
        if random.random() < 0.2:
            options.after = verbs_pb2.AFTER_UPDATE_STAY_PAUSED
        if random.random() < 0.3:
            options.quorum = random.randint(1, max(1, len(sim.slots_of(self.model)) - 1))
        deadline = self.node.loop.time() + limit
        sim.observer.note(f"{self.node.name} begins {tag}: {sources} sources, quorum {options.quorum}")
        plan = await self.call("BeginWeightUpdate", begin, 10.0)
        weights = contents(tag)
        sim.published[self.model, plan.version.sequence] = weights
        renewing = asyncio.ensure_future(self._renew(plan))
        try:
            while True:
                try:
                    await self._attempt(plan, weights, deadline)
                    break
                except RlctlError as error:
                    if plan.attempt > begin.retries:
                        raise
                    again = update_pb2.RetryWeightUpdateRequest(
                        update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=plan.attempt
                    )
                    sim.observer.note(f"{tag} tries again: {error}")
                    plan = await self.call("RetryWeightUpdate", again, 10.0)
            expected = digest(weights) if random.random() < 0.8 else ""
            commit = update_pb2.CommitWeightUpdateRequest(
                update_id=plan.update_id, fencing_token=plan.fencing_token, expected_digest=expected
            )
            operation = await self.call("CommitWeightUpdate", commit, deadline - self.node.loop.time() + 45.0)
            sim.observer.note(f"{tag} ended {operation.state} {operation.error.message}")
        except RlctlError as error:
            sim.observer.note(f"{tag} failed: {error}")
            self.boot_id = sim.world.new_id()
            abort = update_pb2.AbortWeightUpdateRequest(
                update_id=plan.update_id, fencing_token=plan.fencing_token, reason=str(error)
            )
            with contextlib.suppress(RlctlError):
                await self.call("AbortWeightUpdate", abort, 60.0)
        finally:
            renewing.cancel()

    async def _renew(self, plan: update_pb2.BeginWeightUpdateResponse) -> None:
        request = update_pb2.RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
        while True:
            await asyncio.sleep(plan.lease_ttl.seconds / 3)
            with contextlib.suppress(RlctlError):
                await self.sim.network.call(self.node, COORDINATOR, "RenewLease", request, plan.lease_ttl.seconds / 3)

    async def _attempt(
        self, plan: update_pb2.BeginWeightUpdateResponse, weights: dict[str, str], deadline: float
    ) -> None:
        groups = sorted(plan.groups, key=lambda group: group.source)
        shares = {group.group_name: list(NAMES)[group.source :: len(groups)] for group in groups}
        receive = verbs_pb2.UpdateWeightsFromDistributedRequest()
        receive.header.fence.update_id = plan.update_id
        for number in range(len(NAMES)):
            for name, share in shares.items():
                if number < len(share):
                    bucket = receive.buckets.add(sequence=number, group_name=name, names=[share[number]])
                    bucket.dtypes.append("torch.float32")
                    bucket.shapes.add().dims.append(1)

        async def source(group: update_pb2.GroupPlan) -> None:
            left = deadline - self.node.loop.time()
            if not group.formed:
                await self.sim.fabric.join(self.node, group.group_name, 0, group.world_size, left)
            for name in shares[group.group_name]:
                left = deadline - self.node.loop.time()
                await self.sim.fabric.send(self.node, group.group_name, {name: weights[name]}, left)

        async def drive() -> None:
            for group in plan.groups:
                if group.formed:
                    continue
                join = verbs_pb2.InitWeightsUpdateGroupRequest(
                    master_address="trainer",
                    master_port=1,
                    world_size=group.world_size,
                    group_name=group.group_name,
                    backend=group.backend,
                )
                join.header.fence.update_id = plan.update_id
                self._refuse_failed(await self.verb(join, max(0.5, deadline - self.node.loop.time())))
            self._refuse_failed(await self.verb(receive, max(0.5, deadline - self.node.loop.time())))

        tasks = [asyncio.ensure_future(drive()), *(asyncio.ensure_future(source(group)) for group in groups)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse_failed(self, operation: Operation) -> None:
        if operation.state != OPERATION_STATE_OK:
            raise Reason.GROUP_FAILED.error(operation.error.message)


class Operator(Caller):
    """Uses the bare verbs."""

    async def act(self) -> None:
        """One thing that an operator might do."""
        sim, random = self.sim, self.random
        model = random.choice(sorted(sim.models))
        slots = sim.slots_of(model)
        target = Target(model=model)
        if random.random() < 0.3:
            target.slots.append(random.choice(slots))
        header = RequestHeader(target=target)
        tags = random.choice(([], [MEMORY_TAG_KV_CACHE], [MEMORY_TAG_WEIGHTS]))
        modes = (PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN)
        choices: list[Message] = [
            verbs_pb2.PauseGenerationRequest(header=header, mode=random.choice(modes)),
            verbs_pb2.ContinueGenerationRequest(header=header),
            verbs_pb2.ContinueGenerationRequest(header=header),
            verbs_pb2.FlushCacheRequest(header=header),
            verbs_pb2.ReleaseMemoryRequest(header=header, tags=tags),
            verbs_pb2.ResumeMemoryRequest(header=header, tags=tags),
            verbs_pb2.CheckWeightsRequest(header=header),
            verbs_pb2.AbortRequestsRequest(header=header, abort_all=True),
            verbs_pb2.GetModelInfoRequest(header=header),
        ]
        if random.random() < 0.1:
            choices = [
                verbs_pb2.CheckWeightsRequest(header=header, action=verbs_pb2.CHECK_ACTION_RESET_TENSORS),
            ]
        await self.do(random.choice(choices))

    async def do(self, request: Message, timeout_s: float = 15.0) -> None:
        """Let a verb be carried out, whatever comes of it."""
        name = type(request).__name__.removesuffix("Request")
        self.sim.observer.note(f"operator: {name} {request.header.target.slots}")  # type: ignore[attr-defined]
        with contextlib.suppress(RlctlError):
            operation = await self.verb(request, timeout_s)
            self.sim.observer.note(f"operator: {name} ended {operation.state}")

    async def from_disk(self, model: str, tag: str) -> None:
        """An update by checkpoint."""
        self.sim.disks[tag] = contents(tag)
        header = RequestHeader(target=Target(model=model))
        request = verbs_pb2.UpdateWeightsFromDiskRequest(header=header, model_path=tag, weight_version=tag)
        request.options.pause = self.random.choice((PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT))
        if self.random.random() < 0.5:
            request.expected_digest = digest(contents(tag))
        await self.do(request, 40.0)

    async def heal(self) -> None:
        """Heal whatever needs it."""
        with contextlib.suppress(RlctlError):
            request = HealStageRequest()
            request.header.timeout.CopyFrom(duration(30.0))
            await self.call("HealStage", request, 60.0)

    async def enable(self, slot: str, *, enabled: bool) -> None:
        """Set the operator's flag."""
        with contextlib.suppress(RlctlError):
            await self.call("SetStageEnabled", SetStageEnabledRequest(slots=[slot], enabled=enabled), 10.0)


class Client:
    """Generates at one slot after the other."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    async def generate(self, slot: str) -> None:
        """One request, served where it is sent."""
        host = self.sim.stages.get(slot)
        if host is None or not host.alive:
            return
        request = GenerateRequest(rid=self.sim.world.new_id())
        request.input_ids.ids.append(1)
        request.sampling_params.max_new_tokens = self.sim.world.random.randint(1, 60)
        host.node.start(_read(host.generate(request, 30.0)))


async def _read(parts: Any) -> None:
    with contextlib.suppress(RlctlError):
        async for _ in parts:
            pass
