"""A trainer: the production lead over simulated sources, which updates a model in every supported way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from rlctl.client.admin import AsyncAdmin
from rlctl.client.connection import REPLY_S, Connection
from rlctl.contract.durations import duration
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.trainer.lead import Leading
from rlctl.trainer.member_streams import Members
from rlctl.trainer.pending_update import UpdateState
from rlctl.v1 import update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import (
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    TRANSPORT_TORCH_GLOO,
    TRANSPORT_TORCH_NCCL,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_UNSPECIFIED,
    RequestHeader,
    Target,
    WeightVersion,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.trainer_pb2 import Sent
from tests.simulator.callers.operators_and_clients import MODES, Caller, Client
from tests.simulator.callers.trainer_ranks import Following, Run, SimPart, SimSource, SimStore
from tests.simulator.inspection import staged
from tests.simulator.model.rank_weights import ADAPTER_NAMES, NAMES, contents, probed
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.processes.coordinator import COORDINATOR
from tests.simulator.processes.fleet import Fleet

VERIFY = (
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_EXPECTED,
)

UPDATE_CALLS = {
    "BeginWeightUpdate",
    "RetryWeightUpdate",
    "CommitBatch",
    "CommitWeightUpdate",
    "AbortWeightUpdate",
}

GRACE_S = 5.0
"""Seconds after the deadline in which the lead aborts."""

WHOLE, IN_ROUNDS, AT_ONCE = "whole", "in rounds", "at once"
"""How a trainer has the buckets of a group received. The lead sends them whole."""


class Trainer(Caller):
    """Updates a model with the production lead: rank 0 of one or several processes.

    Attributes:
        nodes: the processes, by rank.
    """

    def __init__(self, fleet: Fleet, model: str, incarnation: int) -> None:
        world = fleet.sim.world
        name = f"trainer-{model}-{incarnation}/{len(world.nodes)}"
        super().__init__(fleet, world.spawn(name))
        self.model = model
        self.incarnation = incarnation
        chance = world.chance(f"ranks of {name}")
        size, all_send = chance.choice((1, 1, 1, 2, 3)), chance.random() < 0.7
        members = Members(size)
        fleet.sim.network.listen(self.node, name, lambda end: members.listen(cast(Any, end)))
        self._members = members
        self._following = []
        for rank in range(1, size):
            node = world.spawn(f"{name}/{rank}")
            part = SimPart(self.sim, node, rank if all_send else None)
            self._following.append(Following(self.sim, node, rank, part, name))
        self.nodes = [self.node, *(rank.node for rank in self._following)]
        self._sources = size if all_send else 1
        self._leading = Leading(
            AsyncAdmin(cast(Connection, _Connection(self))),
            model,
            SimPart(self.sim, self.node, 0),
            members,
            host="trainer",
            trainer=update_pb2.Trainer(name=name, incarnation=incarnation),
            bucket_bytes=chance.choice((4, 4, 8)),
            new_store=SimStore,
            new_id=world.new_id,
        )
        self._base = WeightVersion()
        """The last version of which the lead knows the digests."""
        self.open: _Open | None = None
        """The update under way."""

    def _begin(self, tag: str, chance: random.Random) -> update_pb2.BeginWeightUpdateRequest:
        """Draw a begin request."""
        begin = update_pb2.BeginWeightUpdateRequest(
            model=self.model,
            version=tag,
            kind=chance.choice((verbs_pb2.UPDATE_KIND_FULL,) * 7 + (verbs_pb2.UPDATE_KIND_PARTIAL,) * 2),
            path=update_pb2.DATA_PATH_BROADCAST,
            retries=chance.choice((0, 0, 2)),
        )
        begin.lease_ttl.CopyFrom(duration(chance.choice((3.0, 30.0))))
        self._choose_way(begin)
        options = begin.options
        options.pause = chance.choice((PAUSE_MODE_UNSPECIFIED, *MODES))
        options.abort_all_requests = chance.random() < 0.3
        if chance.random() < 0.15:
            begin.kind, begin.adapter = verbs_pb2.UPDATE_KIND_ADAPTER, "math"
            options.ClearField("digest")
            begin.ClearField("base")
            begin.adapter_config.CopyFrom(verbs_pb2.AdapterConfig(lora_rank=1, target_modules=["q_proj"]))
            begin.apply = chance.choice((verbs_pb2.APPLY_MODE_UNSPECIFIED, verbs_pb2.APPLY_MODE_STAGED))
        elif chance.random() < 0.3:
            begin.apply = verbs_pb2.APPLY_MODE_STAGED
            options.pause = options.pause or PAUSE_MODE_RETRACT
            begin.rollout.max_unavailable = chance.choice((0, 0, 1, 2))
        elif chance.random() < 0.3:
            begin.rollout.max_unavailable = chance.choice((1, 2))
        stays = chance.random() < 0.2 and not begin.rollout.max_unavailable
        if stays and begin.kind != verbs_pb2.UPDATE_KIND_ADAPTER:
            options.after = verbs_pb2.AFTER_UPDATE_STAY_PAUSED
        if chance.random() < 0.3:
            options.quorum = chance.randint(1, max(1, len(self.fleet.models[self.model]) - 1))
        if chance.random() < 0.2:
            options.adapters = verbs_pb2.ADAPTER_POLICY_DROP
        if chance.random() < 0.15:
            options.verify = chance.choice(VERIFY)
        if chance.random() < 0.3 and begin.kind == verbs_pb2.UPDATE_KIND_FULL:
            expected = contents(tag if chance.random() < 0.8 else f"{tag}, mistaken")
            if self._able() or self.sim.world.chance(f"probe of {tag}").random() < 0.1:
                prompts = [verbs_pb2.ProbePrompt(token_ids=[1, 2, 3]), verbs_pb2.ProbePrompt(token_ids=[4, 5])]
                options.probe.prompts.extend(probed(expected, prompts))
                options.probe.tolerance = 1e-6
        if begin.kind != verbs_pb2.UPDATE_KIND_ADAPTER and self.sim.world.chance(f"decode of {tag}").random() < 0.3:
            slots = [self.sim.slots[slot] for slot in self.fleet.models[self.model]]
            options.decode_check = all(slot.compares_decode for slot in slots)
        return begin

    def _able(self) -> bool:
        """Return True if every stage of the model can compute a probe: otherwise an update with a probe is refused."""
        return all(self.sim.slots[slot].probes for slot in self.fleet.models[self.model])

    def _known(self, version: WeightVersion) -> bool:
        return (self.model, version.sequence) in self.sim.observer.published

    def _choose_way(self, begin: update_pb2.BeginWeightUpdateRequest) -> None:
        """Draw the path of the tensors, and whether unchanged tensors are omitted."""
        chance = self.sim.world.chance(f"way of {begin.version}")
        if chance.random() < 0.4:
            begin.path = chance.choice((update_pb2.DATA_PATH_UNSPECIFIED,) * 4 + (update_pb2.DATA_PATH_IPC,))
        if chance.random() < 0.1:
            begin.transports[:] = [TRANSPORT_TORCH_NCCL, TRANSPORT_TORCH_GLOO]
        if begin.kind == verbs_pb2.UPDATE_KIND_PARTIAL and chance.random() < 0.5 and self._known(self._base):
            begin.kind = verbs_pb2.UPDATE_KIND_DELTA
            begin.base.label = self._base.label
        chance = self.sim.world.chance(f"digest of {begin.version}")
        able = all(self.sim.slots[slot].computes_keyed_digests for slot in self.fleet.models[self.model])
        drawn = chance.random()
        if drawn < (0.1 if able else 0.05):
            begin.options.digest = verbs_pb2.DIGEST_FUNCTION_KEYED
        elif drawn < 0.5:
            begin.options.digest = verbs_pb2.DIGEST_FUNCTION_PREFER_KEYED

    async def update(self, tag: str, chance: random.Random) -> None:
        """Run an update, from its begin to its end or failure. Raises the error of the lead."""
        sim = self.sim
        begin = self._begin(tag, chance)
        limit = chance.uniform(10, 40)
        if chance.random() < 0.8:
            begin.header.timeout.CopyFrom(duration(limit))
        sim.observer.note(f"{self.node.name} begins {tag}: {_words(begin)}, {self._sources} sources")
        users = sim.world.chance(f"users of {tag}")
        if begin.adapter and users.random() < 0.7:
            await self._load_first(begin, users)
        update = self.open = _Open(begin, self._contents(begin, tag, chance), users)
        update.forgets_digest, update.forgets_fingerprints = chance.random() < 0.3, chance.random() < 0.5
        update.writes = chance.choice((WHOLE, WHOLE, WHOLE, IN_ROUNDS, AT_ONCE))
        names = list(update.contents)
        shares = [
            {name: update.contents[name] for name in names[rank :: self._sources]} for rank in range(self._sources)
        ]
        in_place_batches = begin.rollout.max_unavailable and begin.apply != verbs_pb2.APPLY_MODE_STAGED
        run = Run(sim, self.node.name, tag, limit + GRACE_S, refusable=not in_place_batches)
        for rank in self._following:
            rank.update(run, SimSource(shares[rank.part.source] if rank.part.source else {}))
        state, finite_only = UpdateState(), users.random() < 0.1
        operation: Operation | None = None
        try:
            operation = await run.watch(
                self.node.name, state, self._lead(begin, SimSource(shares[0]), state, limit, finite_only=finite_only)
            )
        except OperationFailed as error:
            operation = error.operation
            raise
        finally:
            if operation is not None and update.plan is not None:
                sim.observer.note(f"{tag} ended {operation.state} {operation.error.message}")
                if begin.apply == verbs_pb2.APPLY_MODE_STAGED or begin.adapter:
                    staged(self.fleet, operation, update.plan, begin)
        if operation is not None and begin.kind in (verbs_pb2.UPDATE_KIND_FULL, verbs_pb2.UPDATE_KIND_DELTA):
            self._base = operation.weight_version

    async def _lead(
        self,
        begin: update_pb2.BeginWeightUpdateRequest,
        source: SimSource,
        state: UpdateState,
        deadline_s: float,
        *,
        finite_only: bool,
    ) -> tuple[Operation, Sent]:
        with self._members.update(begin.version, state):
            return await self._leading.run(
                source, begin, state, checkpoint="", finite_only=finite_only, deadline_s=deadline_s
            )

    async def begun(self, plan: update_pb2.BeginWeightUpdateResponse) -> None:
        """Record the promises of an update that the coordinator has begun."""
        update, observer = self.open, self.sim.observer
        assert update is not None
        update.plan, begin = plan, update.begin
        if not begin.adapter:
            observer.begun[self.node.name, begin.version] = (self.model, plan.version.sequence)
        gives_digest = begin.kind != verbs_pb2.UPDATE_KIND_PARTIAL and update.complete and not update.forgets_digest
        if gives_digest and begin.options.verify in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_EXPECTED):
            observer.digested.add(plan.update_id)
        in_batches = begin.rollout.max_unavailable and begin.apply != verbs_pb2.APPLY_MODE_STAGED
        several = len(plan.targets) > 1 and not in_batches  # a batch may have a single stage
        if begin.options.verify in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_REPLICA) and several:
            observer.compared.add(plan.update_id)
        prompts = begin.options.probe.prompts
        if prompts and probed(contents(begin.version), prompts) != list(prompts):
            observer.mistaken.add(plan.update_id)
        if begin.adapter:
            observer.adapters[self.model, begin.adapter, begin.version] = update.contents
            await self._use(begin.adapter, plan, update.users)
            return
        whole = update.contents if update.complete else contents(begin.version)
        if begin.kind == verbs_pb2.UPDATE_KIND_PARTIAL:
            base = observer.published.get((self.model, observer.sequence(self.model)))
            if base is None:  # the base is an implicit update's, and no stage has served it yet
                raise Reason.CANCELLED.error("what it would be based on is not known")
            whole = {**base, **update.contents}
        observer.published[self.model, plan.version.sequence] = whole

    async def _load_first(self, begin: update_pb2.BeginWeightUpdateRequest, chance: random.Random) -> None:
        """Load an adapter from disk, so that the update replaces an adapter in use."""
        begin.options.pause = chance.choice((PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE))
        tag = f"{begin.version}-before"
        self.sim.disks[tag] = self.sim.observer.adapters[self.model, begin.adapter, tag] = contents(tag, ADAPTER_NAMES)
        load = verbs_pb2.LoadAdapterRequest(
            header=RequestHeader(target=Target(model=self.model)),
            name=begin.adapter,
            path=tag,
            version=tag,
            abort_requests=True,
        )
        with contextlib.suppress(RlctlError):
            await self.verb(load, 15.0)

    async def _use(self, adapter: str, plan: update_pb2.BeginWeightUpdateResponse, chance: random.Random) -> None:
        """Run requests with an adapter, and without, during its replacement; slow some stages down."""
        client = Client(self.fleet)
        for target in plan.targets:
            for name in (adapter, ""):
                await client.use(target.slot, name, chance)
            host = self.fleet.stages.get(target.slot)
            if host is not None and chance.random() < 0.5 and not self.sim.settling:
                host.answer_slowly(chance)

    def _contents(self, begin: update_pb2.BeginWeightUpdateRequest, tag: str, chance: random.Random) -> Tensors:
        """Return the tensors of the sources."""
        if begin.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
            return contents(tag, ADAPTER_NAMES)
        whole = contents(tag)
        if begin.kind in (verbs_pb2.UPDATE_KIND_PARTIAL, verbs_pb2.UPDATE_KIND_DELTA):
            chosen = chance.sample(NAMES, chance.randint(1, len(NAMES) - 1))
            some = {name: content for name, content in whole.items() if name in chosen}
            if begin.kind == verbs_pb2.UPDATE_KIND_PARTIAL:
                return some
            return {**self.sim.observer.published[self.model, self._base.sequence], **some}
        if chance.random() < 0.04:  # every source omits the same tensor by mistake
            del whole[chance.choice(NAMES)]
        return whole


@dataclass
class _Open:
    """An update under way.

    Attributes:
        contents: the tensors of all sources.
        users: randomness for the users of an adapter.
        plan: the coordinator's plan; None before the begin.
        forgets_digest: the trainer commits without the digest of its weights.
        forgets_fingerprints: the trainer commits without the short digests of each tensor.
        writes: the buckets of a group in one request, in rounds, or in all rounds at once.
    """

    begin: update_pb2.BeginWeightUpdateRequest
    contents: Tensors
    users: random.Random
    plan: update_pb2.BeginWeightUpdateResponse | None = None
    forgets_digest: bool = False
    forgets_fingerprints: bool = False
    writes: str = WHOLE

    @property
    def complete(self) -> bool:
        """Return False if the sources omit a tensor by mistake."""
        return self.begin.kind != verbs_pb2.UPDATE_KIND_FULL or len(self.contents) == len(NAMES)


class _Connection:
    """The lead's connection to the coordinator.

    Some trainers give fewer digests than the lead, and some have the buckets received in several requests.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Make a call, repeated after a lost answer."""
        trainer, update = self._trainer, self._trainer.open
        assert update is not None
        limit = max(0.0, timeout_s) + REPLY_S
        if method == "RenewLease":
            return await trainer.sim.network.call(trainer.node, COORDINATOR, method, request, limit)
        if isinstance(request, update_pb2.CommitWeightUpdateRequest | update_pb2.CommitBatchRequest):
            if update.forgets_digest:
                request.expected_digest = request.sent_digest = ""
            if update.forgets_digest or update.forgets_fingerprints:
                request.fingerprints = b""
        if isinstance(request, verbs_pb2.UpdateWeightsFromDistributedRequest) and update.writes != WHOLE:
            return await self._write_in_rounds(request, limit, at_once=update.writes == AT_ONCE)
        answer = await trainer.call(method if method in UPDATE_CALLS else "Verb", request, limit)
        if method == "BeginWeightUpdate" and update.plan is None:
            await trainer.begun(answer)
        if isinstance(request, verbs_pb2.GetModelInfoRequest) and not update.complete:
            # An engine without a reference: the lead cannot find the omission.
            without = Operation()
            without.CopyFrom(answer)
            for result in without.stage_results:
                for rank in result.rank_results:
                    rank.model_info.ClearField("reference")
            return without
        return answer

    async def _write_in_rounds(
        self, request: verbs_pb2.UpdateWeightsFromDistributedRequest, timeout_s: float, *, at_once: bool
    ) -> Operation:
        """Have the ranks receive the buckets in several requests, one for each sequence number."""
        rounds: dict[int, verbs_pb2.UpdateWeightsFromDistributedRequest] = {}
        for bucket in request.buckets:
            if bucket.sequence not in rounds:
                rounds[bucket.sequence] = verbs_pb2.UpdateWeightsFromDistributedRequest(header=request.header)
            rounds[bucket.sequence].buckets.append(bucket)
        calls = (self._trainer.call("Verb", write, timeout_s) for write in rounds.values())
        if at_once:
            answers: list[Operation] = await asyncio.gather(*calls)
            return next((answer for answer in answers if answer.state != OPERATION_STATE_OK), answers[-1])
        for call in calls:
            answer: Operation = await call
            if answer.state != OPERATION_STATE_OK:
                break
        return answer


def _words(begin: update_pb2.BeginWeightUpdateRequest) -> str:
    kind = verbs_pb2.UpdateKind.Name(begin.kind).removeprefix("UPDATE_KIND_").lower()
    staged = ", staged" if begin.apply == verbs_pb2.APPLY_MODE_STAGED else ""
    path = update_pb2.DataPath.Name(begin.path).removeprefix("DATA_PATH_").lower()
    rolling = f", {begin.rollout.max_unavailable} at a time" if begin.rollout.max_unavailable else ""
    return f"{kind} by {path}{staged}{rolling}, quorum {begin.options.quorum}"
