"""Users of the fleet beside trainers: an operator with the bare verbs, and clients that generate."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.v1 import verbs_pb2
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    RequestHeader,
    Target,
)
from rlctl.v1.coordinator_pb2 import (
    CancelOperationRequest,
    DeregisterStageRequest,
    GetFleetRequest,
    HealStageRequest,
    ListOperationsRequest,
    SetHealingRequest,
    SetStageEnabledRequest,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.rollout_pb2 import GenerateManyRequest, GenerateRequest, NumberedRequest
from rlctl.v1.update_pb2 import CommitWeightUpdateRequest
from tests.simulator.model.rank_weights import ADAPTER_NAMES, contents, digest
from tests.simulator.ports.virtual_time import Node
from tests.simulator.processes.coordinator import COORDINATOR
from tests.simulator.processes.fleet import Fleet
from tests.simulator.processes.stage import StageHost

GRACE_S = 2.0
"""Time by which a call may exceed its timeout before the excess counts as a violation."""

RETRIES = 3

ADAPTERS = ("math", "code")
"""Names of every model's adapters."""

MODES = (PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN)

MOSTLY_ABLE = (PAUSE_MODE_ABORT, PAUSE_MODE_DRAIN, *MODES)
"""Modes of pauses of an adapter: some engines have only the first two."""

GOES_ON_S = 30.0
"""Longest wait for the first token at an admitting stage: in a drain, earlier requests end first."""

LOST = (Reason.LINK_LOST, Reason.UNREACHABLE, Reason.DEADLINE_EXCEEDED)
"""Failures with an unknown outcome."""


class Caller:
    """A process's calls to the coordinator, repeated under one request_id after a lost answer."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        self.fleet = fleet
        self.sim = fleet.sim
        self.node = node
        self.random = node.random

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Make a logical call. Raises the error of the last try."""
        header = getattr(request, "header", None)
        if header is not None and not header.request_id and method != "RenewLease":
            header.request_id = self.sim.world.new_id()
        sent = False
        for attempt in range(RETRIES + 1):
            started, stops = self.sim.world.now, self.node.stops
            try:
                answer = await self.sim.network.call(self.node, COORDINATOR, method, request, timeout_s)
            except RlctlError as error:
                if stops == self.node.stops:
                    self.sim.observer.took(method, self.sim.world.now - started, timeout_s + GRACE_S)
                sent |= error.outcome == OUTCOME_UNKNOWN
                if attempt == RETRIES or error.reason not in LOST:
                    if sent and error.reason in LOST:
                        error.outcome = OUTCOME_UNKNOWN  # an earlier try may have arrived
                    raise
                await asyncio.sleep(self.random.uniform(0.05, 0.5))
                continue
            if isinstance(answer, Operation):
                self.sim.observer.answered(answer)
            return answer
        raise AssertionError("not reached")

    async def verb(self, request: Message, timeout_s: float) -> Operation:
        """Call a verb of the table."""
        request.header.timeout.CopyFrom(duration(timeout_s))  # type: ignore[attr-defined]
        answer: Operation = await self.call("Verb", request, timeout_s + 1.0)
        return answer


class Operator(Caller):
    """Uses the bare verbs. ``chance`` decides each action."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        super().__init__(fleet, node)
        self._loaded = 0

    def _anywhere(self, chance: random.Random) -> RequestHeader:
        model = chance.choice(sorted(self.fleet.models))
        target = Target(model=model)
        if chance.random() < 0.3:
            target.slots.append(chance.choice(self.fleet.models[model]))
        return RequestHeader(target=target)

    async def act(self, chance: random.Random) -> None:
        await self.do(self._verb(chance), chance)

    def _verb(self, chance: random.Random) -> Message:
        header = self._anywhere(chance)
        tags = chance.choice(([], [MEMORY_TAG_KV_CACHE], [MEMORY_TAG_WEIGHTS]))
        choices: list[Message] = [
            verbs_pb2.PauseGenerationRequest(header=header, mode=chance.choice(MODES)),
            verbs_pb2.ContinueGenerationRequest(header=header),
            verbs_pb2.ContinueGenerationRequest(header=header),
            verbs_pb2.FlushCacheRequest(header=header),
            verbs_pb2.ReleaseMemoryRequest(header=header, tags=tags, keep_weights=chance.random() < 0.5),
            verbs_pb2.ResumeMemoryRequest(header=header, tags=tags),
            self._check(header),
            verbs_pb2.AbortRequestsRequest(header=header, abort_all=True),
            verbs_pb2.GetModelInfoRequest(header=header),
        ]
        if chance.random() < 0.1:
            choices = [verbs_pb2.CheckWeightsRequest(header=header, action=verbs_pb2.CHECK_ACTION_RESET_TENSORS)]
        return chance.choice(choices)

    def _check(self, header: RequestHeader) -> verbs_pb2.CheckWeightsRequest:
        """Return a checksum request, by a drawn digest function."""
        chance = self.sim.world.chance(f"check of {self.sim.world.now}")
        functions = (verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED, verbs_pb2.DIGEST_FUNCTION_AS_VERIFIED)
        key = chance.randbytes(16) if chance.random() < 0.2 else b""
        function = verbs_pb2.DIGEST_FUNCTION_UNSPECIFIED if key else chance.choice(functions)
        return verbs_pb2.CheckWeightsRequest(header=header, digest=function, digest_key=key)

    async def do(self, request: Message, chance: random.Random, timeout_s: float = 15.0) -> None:
        """Call a verb, with any outcome; sometimes repeat the call."""
        name = type(request).__name__.removesuffix("Request")
        self.sim.observer.note(f"operator: {name} {request.header.target.slots}")  # type: ignore[attr-defined]
        with contextlib.suppress(RlctlError):
            operation = await self.verb(request, timeout_s)
            self.sim.observer.note(f"operator: {name} ended {operation.state}")
            if chance.random() < 0.2:
                await self._again(request, operation, chance)

    async def _again(self, request: Message, first: Operation, chance: random.Random) -> None:
        """Repeat a call. The same body gets the same answer; a different body is refused.

        A read is not on record: it is answered anew, and its ranks do nothing twice.
        """
        await asyncio.sleep(chance.uniform(0, 10))
        recorded = of_request(request).mutates(request)
        other = recorded and chance.random() < 0.3
        if other:
            changed = type(request)()
            changed.CopyFrom(request)
            changed.header.target.stages.append("main")  # type: ignore[attr-defined]
            request = changed
        with contextlib.suppress(RlctlError):
            second = await self.sim.network.call(self.node, COORDINATOR, "Verb", request, 20.0)
            if recorded:
                self.sim.observer.repeated(first, second, same=not other)

    async def hurry(self, chance: random.Random) -> None:
        """Call verbs with short timeouts, call the next verb meanwhile, disconnect before the answer, and repeat."""
        slot = chance.choice(sorted(self.fleet.stages))
        if chance.random() < 0.6 and not self.sim.settling:
            self.fleet.stages[slot].answer_slowly(chance)
        for _ in range(chance.randint(2, 6)):
            short, request = self._verb(chance), self._verb(chance)
            for each in (short, request):
                each.header.target.CopyFrom(Target(slots=[slot]))  # type: ignore[attr-defined]
            given_up = asyncio.ensure_future(self.do(short, chance, chance.choice((0.02, 0.05, 0.2, 0.5))))
            await asyncio.sleep(chance.uniform(0, 0.02))
            request.header.request_id = self.sim.world.new_id()  # type: ignore[attr-defined]
            request.header.timeout.CopyFrom(duration(15.0))  # type: ignore[attr-defined]
            with contextlib.suppress(RlctlError, TimeoutError):
                async with asyncio.timeout(chance.choice((0.003, 0.01, 0.05, 0.5))):
                    await self.sim.network.call(self.node, COORDINATOR, "Verb", request, 16.0)
            if chance.random() < 0.7:
                await self.do(request, chance)
            await given_up

    async def nap(self, chance: random.Random) -> None:
        """Put a model to sleep, and wake the model up."""
        header = RequestHeader(target=Target(model=chance.choice(sorted(self.fleet.models))))
        tags = chance.choice(([MEMORY_TAG_KV_CACHE], [MEMORY_TAG_KV_CACHE], []))
        for request in (
            verbs_pb2.PauseGenerationRequest(header=header, mode=chance.choice(MODES)),
            verbs_pb2.ReleaseMemoryRequest(header=header, tags=tags, keep_weights=chance.random() < 0.5),
            None,
            verbs_pb2.ContinueGenerationRequest(header=header, when_resident=chance.random() < 0.5),
            verbs_pb2.ResumeMemoryRequest(header=header, tags=tags),
            verbs_pb2.ContinueGenerationRequest(header=header),
        ):
            if request is None:
                await asyncio.sleep(chance.uniform(0.5, 15))
            else:
                await self.do(request, chance)

    async def from_disk(self, chance: random.Random) -> None:
        """Update a model from a checkpoint."""
        self._loaded += 1
        model = chance.choice(sorted(self.fleet.models))
        tag = f"{model}-disk-{self._loaded}"
        self.sim.disks[tag] = contents(tag)
        header = RequestHeader(target=Target(model=model))
        request = verbs_pb2.UpdateWeightsFromDiskRequest(header=header, model_path=tag, weight_version=tag)
        request.options.pause = chance.choice((PAUSE_MODE_UNSPECIFIED, PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT))
        if chance.random() < 0.5:
            request.expected_digest = digest(contents(tag))
        if chance.random() < 0.4:
            request.apply = verbs_pb2.APPLY_MODE_STAGED
            request.options.pause = PAUSE_MODE_RETRACT
            request.max_unavailable = chance.choice((0, 1, 2))
        await self.do(request, chance, 40.0)

    async def load_adapter(self, chance: random.Random) -> None:
        """Load an adapter from a file."""
        await self._load(chance.choice(sorted(self.fleet.models)), chance.choice(ADAPTERS), chance)

    async def _load(self, model: str, name: str, chance: random.Random) -> None:
        self._loaded += 1
        tag = f"{model}-{name}-{self._loaded}"
        self.sim.disks[tag] = self.sim.observer.adapters[model, name, tag] = contents(tag, ADAPTER_NAMES)
        request = verbs_pb2.LoadAdapterRequest(
            header=RequestHeader(target=Target(model=model)),
            name=name,
            path=tag,
            version=tag,
            abort_requests=chance.random() < 0.7,
        )
        await self.do(request, chance, 20.0)

    async def unload_adapter(self, chance: random.Random) -> None:
        target = Target(model=chance.choice(sorted(self.fleet.models)))
        name = chance.choice(ADAPTERS)
        request = verbs_pb2.UnloadAdapterRequest(
            header=RequestHeader(target=target), name=name, abort_requests=chance.random() < 0.7
        )
        await self.do(request, chance)

    async def pause_adapter(self, chance: random.Random) -> None:
        """Pause an adapter in use, check that other requests go on, and mostly continue the adapter."""
        model, name = chance.choice(sorted(self.fleet.models)), chance.choice(ADAPTERS)
        await self._load(model, name, chance)
        client = Client(self.fleet)
        for slot in self.fleet.models[model]:
            await client.use(slot, name, chance)
        header = RequestHeader(target=Target(model=model))
        if chance.random() < 0.3:
            header.target.slots.append(chance.choice(self.fleet.models[model]))
        await asyncio.sleep(chance.uniform(0, 2))
        pause = verbs_pb2.PauseGenerationRequest(header=header, adapter=name, mode=chance.choice(MOSTLY_ABLE))
        if chance.random() < 0.3:
            pause.ttl.CopyFrom(duration(chance.uniform(2, 20)))
        self.sim.observer.note(f"operator: pauses {name} of {model} {header.target.slots}")
        with contextlib.suppress(RlctlError):
            operation = await self.verb(pause, 15.0)
            self.sim.observer.note(f"operator: pause of {name} ended {operation.state} {operation.error.message}")
            if operation.state == OPERATION_STATE_OK:
                for slot in operation.targets:
                    other = next(each for each in ADAPTERS if each != name)
                    self.node.start(client.goes_on(slot, chance.choice(("", other)), f"the pause of {name}", chance))
        await asyncio.sleep(chance.uniform(0, 15))
        for request, often in (
            (None, 0.3),
            (verbs_pb2.ContinueGenerationRequest(header=header), 0.3),
            (verbs_pb2.ContinueGenerationRequest(header=header, adapter=name), 0.75),
        ):
            if chance.random() < often:
                await (self._load(model, name, chance) if request is None else self.do(request, chance))

    async def heal(self, chance: random.Random) -> None:
        """Heal all stages that need a heal."""
        del chance
        with contextlib.suppress(RlctlError):
            request = HealStageRequest()
            request.header.timeout.CopyFrom(duration(30.0))
            await self.call("HealStage", request, 60.0)

    async def rename(self, chance: random.Random) -> None:
        """Rename the published version, like clients that name a version after their update."""
        self._loaded += 1
        model = chance.choice(sorted(self.fleet.models))
        header = RequestHeader(target=Target(model=model))
        request = CommitWeightUpdateRequest(header=header, version=f"{model}-renamed-{self._loaded}")
        with contextlib.suppress(RlctlError):
            await self.call("CommitWeightUpdate", request, 40.0)

    async def disable(self, chance: random.Random) -> None:
        """Take a stage out of service for a while."""
        slot = chance.choice(sorted(self.fleet.stages))
        for enabled in (False, True):
            with contextlib.suppress(RlctlError):
                await self.call("SetStageEnabled", SetStageEnabledRequest(slots=[slot], enabled=enabled), 10.0)
            await asyncio.sleep(chance.uniform(0, 20))

    async def dismiss(self, chance: random.Random) -> None:
        """Deregister a living stage; the stage registers again."""
        request = DeregisterStageRequest(slot=chance.choice(sorted(self.fleet.stages)), force=chance.random() < 0.5)
        with contextlib.suppress(RlctlError):
            await self.call("DeregisterStage", request, 10.0)

    async def heal_by_hand(self, chance: random.Random) -> None:
        """Switch a model's heals to manual for a while."""
        model = chance.choice(sorted(self.fleet.models))
        with contextlib.suppress(RlctlError):
            await self.call("SetHealing", SetHealingRequest(model=model, by_hand=True), 10.0)
        healing = False
        while not healing:
            await asyncio.sleep(chance.uniform(1, 20))
            with contextlib.suppress(RlctlError):
                await self.call("SetHealing", SetHealingRequest(model=model), 10.0)
                healing = True

    async def look(self, chance: random.Random) -> None:
        """Read fleet and operations, and cancel a listed operation."""
        with contextlib.suppress(RlctlError):
            await self.call("GetFleet", GetFleetRequest(), 10.0)
            listed = await self.call("ListOperations", ListOperationsRequest(page_size=5), 10.0)
            if listed.operations:
                chosen = chance.choice(listed.operations).operation_id
                await self.call("CancelOperation", CancelOperationRequest(operation_id=chosen), 60.0)


class Client:
    """Generates at the slots in turn."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.sim = fleet.sim

    async def generate(self, slot: str, chance: random.Random) -> None:
        """Send a request, served at its stage."""
        host = self._host(slot, chance)
        if host is None:
            return
        host.node.start(_read(host.generate(self._request(host, chance), 30.0)))

    async def generate_many(self, slot: str, chance: random.Random) -> None:
        """Send several requests over one stream, and leave some early."""
        host = self._host(slot, chance)
        if host is None:
            return

        async def requests() -> AsyncIterator[GenerateManyRequest]:
            for number in range(1, chance.randint(3, 9)):
                begun = NumberedRequest(number=number, request=self._request(host, chance), timeout=duration(30.0))
                yield GenerateManyRequest(begin=[begun])
                await asyncio.sleep(chance.uniform(0, 2))
                if chance.random() < 0.3:
                    yield GenerateManyRequest(leave=[chance.randint(1, number)])

        host.node.start(_read(host.generate_many(requests())))

    async def use(self, slot: str, adapter: str, chance: random.Random) -> None:
        """Send a long request with an adapter, or without an adapter ("")."""
        host = self._host(slot, chance)
        if host is not None:
            request = self._request(host, chance)
            request.adapter, request.min_version_seq = adapter, 0
            request.sampling_params.max_new_tokens = chance.randint(20, 100)
            host.node.start(_read(host.generate(request, 30.0)))

    async def goes_on(self, slot: str, adapter: str, beside: str, chance: random.Random) -> None:
        """Check I12: a stage that takes a request generates tokens, independent of pauses of other adapters."""
        host = self._host(slot, chance)
        if host is None or not _takes(host, adapter):
            return
        stage, request = host.stage, self._request(host, chance)
        request.adapter, request.min_version_seq = adapter, 0
        tokens: list[int] = []
        task = host.node.start(_read(host.generate(request, GOES_ON_S * 2), tokens))
        for _ in range(int(GOES_ON_S)):
            await asyncio.sleep(1.0)
            if tokens or task.done() or host.stage is not stage or not _takes(host, adapter):
                return
        self.sim.observer.broken("I12", f"{host.name} takes requests with {adapter!r} and generates none, in {beside}")

    def _host(self, slot: str, chance: random.Random) -> StageHost | None:
        """Return the host of a slot: of two processes with one slot, either."""
        hosts = [host for host in self.fleet.filling(slot) if host.alive]
        return chance.choice(hosts) if len(hosts) > 1 else next(iter(hosts), None)

    def _request(self, host: StageHost, chance: random.Random) -> GenerateRequest:
        request = GenerateRequest(rid=self.sim.world.new_id())
        request.input_ids.ids.append(1)
        request.sampling_params.max_new_tokens = chance.randint(1, 60)
        if chance.random() < 0.2:
            request.adapter = chance.choice(ADAPTERS)
        if chance.random() < 0.2:
            request.min_version_seq = self.sim.observer.sequence(host.model)
        return request


async def _read(parts: Any, tokens: list[int] | None = None) -> None:
    with contextlib.suppress(RlctlError):
        async for part in parts:
            if tokens is not None:
                tokens.extend(part.samples[0].output_ids)


def _takes(host: StageHost, adapter: str) -> bool:
    """Return True if a stage would take a request now, and its processes run."""
    if host.stage is None or not all(node.alive and not node.stopped for node in host.nodes):
        return False
    try:
        host.stage.serving.refuse(host.clock, adapter=adapter)
    except RlctlError:
        return False
    return True
