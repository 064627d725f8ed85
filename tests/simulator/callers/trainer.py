"""A trainer: one or more sources that update a model, in every supported way."""

from __future__ import annotations

import asyncio
import contextlib
import random

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import fingerprints
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
from rlctl.v1.results_pb2 import Operation
from tests.simulator.callers.operators_and_clients import MODES, Caller, Client
from tests.simulator.callers.trainer_send import Sending
from tests.simulator.inspection import staged
from tests.simulator.model.rank_weights import ADAPTER_NAMES, NAMES, contents, digest, digests, probed
from tests.simulator.oracle import PUBLISHED
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.shared_memory import TRAINERS_HOST
from tests.simulator.processes.coordinator import COORDINATOR
from tests.simulator.processes.fleet import Fleet

VERIFY = (
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_EXPECTED,
)


class Trainer(Caller):
    """Updates a model."""

    def __init__(self, fleet: Fleet, model: str, incarnation: int) -> None:
        world = fleet.sim.world
        super().__init__(fleet, world.spawn(f"trainer-{model}-{incarnation}/{len(world.nodes)}"))
        self.model = model
        self.incarnation = incarnation
        self.boot_id = world.new_id()
        self.base = WeightVersion()
        """The last version that this trainer published."""

    def _begin(self, tag: str, chance: random.Random) -> update_pb2.BeginWeightUpdateRequest:
        """Draw a begin request."""
        begin = update_pb2.BeginWeightUpdateRequest(
            model=self.model,
            version=tag,
            num_sources=chance.randint(1, 4) if chance.random() < 0.4 else 1,
            kind=chance.choice((verbs_pb2.UPDATE_KIND_FULL,) * 7 + (verbs_pb2.UPDATE_KIND_PARTIAL,) * 2),
            path=update_pb2.DATA_PATH_BROADCAST,
            trainer=update_pb2.Trainer(name=self.node.name, incarnation=self.incarnation, boot_id=self.boot_id),
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
        if begin.kind != verbs_pb2.UPDATE_KIND_ADAPTER and self.sim.world.chance(f"decode of {tag}").random() < 0.2:
            slots = [self.sim.slots[slot] for slot in self.fleet.models[self.model]]
            options.decode_check = all(slot.compares_decode for slot in slots)
        return begin

    def _able(self) -> bool:
        """Return True if every stage of the model can compute a probe: otherwise an update with a probe is refused."""
        return all(self.sim.slots[slot].probes for slot in self.fleet.models[self.model])

    def _choose_way(self, begin: update_pb2.BeginWeightUpdateRequest) -> None:
        """Draw the path of the tensors, and whether unchanged tensors are omitted."""
        chance = self.sim.world.chance(f"way of {begin.version}")
        if chance.random() < 0.4:
            begin.path = chance.choice((update_pb2.DATA_PATH_UNSPECIFIED,) * 4 + (update_pb2.DATA_PATH_IPC,))
            begin.host_ids.append(TRAINERS_HOST)
        if chance.random() < 0.1:
            begin.transports[:] = [TRANSPORT_TORCH_NCCL, TRANSPORT_TORCH_GLOO]
        if begin.kind == verbs_pb2.UPDATE_KIND_PARTIAL and chance.random() < 0.5 and self.base.label:
            begin.kind = verbs_pb2.UPDATE_KIND_DELTA
            begin.base.CopyFrom(self.base)
        chance = self.sim.world.chance(f"digest of {begin.version}")
        able = all(self.sim.slots[slot].computes_keyed_digests for slot in self.fleet.models[self.model])
        if chance.random() < (0.4 if able else 0.05):
            begin.options.digest = verbs_pb2.DIGEST_FUNCTION_KEYED

    async def update(self, tag: str, chance: random.Random) -> None:
        """Run an update, from its begin to its end or failure."""
        sim = self.sim
        begin = self._begin(tag, chance)
        limit = chance.uniform(10, 40)
        if chance.random() < 0.8:
            begin.header.timeout.CopyFrom(duration(limit))
        deadline = self.node.loop.time() + limit
        sim.observer.note(f"{self.node.name} begins {tag}: {_words(begin)}")
        users = sim.world.chance(f"users of {tag}")
        if begin.adapter and users.random() < 0.7:
            await self._load_first(begin, users)
        plan = await self.call("BeginWeightUpdate", begin, 10.0)
        if begin.adapter:
            await self._use(begin.adapter, plan, users)
        sent = self._contents(begin, plan, tag, chance)
        complete = len(sent) in (len(NAMES), len(ADAPTER_NAMES)) or begin.kind == verbs_pb2.UPDATE_KIND_DELTA
        gives_digest = chance.random() < 0.7 and complete
        if gives_digest and begin.options.verify in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_EXPECTED):
            sim.observer.digested.add(plan.update_id)
        in_batches = begin.rollout.max_unavailable and begin.apply != verbs_pb2.APPLY_MODE_STAGED
        several = len(plan.targets) > 1 and not in_batches  # a batch may have a single stage
        if begin.options.verify in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_REPLICA) and several:
            sim.observer.compared.add(plan.update_id)
        prompts = begin.options.probe.prompts
        if prompts and probed(contents(tag), prompts) != list(prompts):
            sim.observer.mistaken.add(plan.update_id)
        whole = (
            sim.observer.adapters.get((self.model, begin.adapter, tag))
            or sim.observer.published[self.model, plan.version.sequence]
        )
        renewing = asyncio.ensure_future(self._renew(plan))
        try:
            with_fingerprints = chance.random() < 0.5

            def said(commit: update_pb2.CommitWeightUpdateRequest | update_pb2.CommitBatchRequest) -> None:
                if gives_digest:
                    key = plan.digest_key
                    commit.expected_digest, commit.sent_digest = digest(whole, key), digest(sent, key)
                    if with_fingerprints:
                        commit.fingerprints = fingerprints(digests(whole, key))

            operation: Operation | None = None
            while operation is None:
                plan = await self._attempts(plan, begin, sent, deadline, chance)
                if plan.batch.number and not plan.batch.last:
                    batch = update_pb2.CommitBatchRequest(
                        update_id=plan.update_id,
                        fencing_token=plan.fencing_token,
                        batch=plan.batch.number,
                    )
                    said(batch)
                    answer = await self.call("CommitBatch", batch, deadline - self.node.loop.time() + 45.0)
                    sim.observer.note(f"{tag} batch {batch.batch}: {answer.WhichOneof('follows')} follows")
                    plan, operation = answer.next, answer.ended if answer.HasField("ended") else None
                    continue
                commit = update_pb2.CommitWeightUpdateRequest(
                    update_id=plan.update_id, fencing_token=plan.fencing_token
                )
                said(commit)
                operation = await self.call("CommitWeightUpdate", commit, deadline - self.node.loop.time() + 45.0)
            sim.observer.note(f"{tag} ended {operation.state} {operation.error.message}")
            if operation.state in PUBLISHED:
                self.base = operation.weight_version
            if begin.apply == verbs_pb2.APPLY_MODE_STAGED or begin.adapter:
                staged(self.fleet, operation, plan, begin)
        except RlctlError as error:
            sim.observer.note(f"{tag} failed: {error}")
            self.boot_id = sim.world.new_id()
            abort = update_pb2.AbortWeightUpdateRequest(
                update_id=plan.update_id,
                fencing_token=plan.fencing_token,
                reason=error.message,
                error=error.detail(),
            )
            with contextlib.suppress(RlctlError):
                await self.call("AbortWeightUpdate", abort, 60.0)
        finally:
            renewing.cancel()

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

    async def _attempts(
        self,
        plan: update_pb2.BeginWeightUpdateResponse,
        begin: update_pb2.BeginWeightUpdateRequest,
        sent: Tensors,
        deadline: float,
        chance: random.Random,
    ) -> update_pb2.BeginWeightUpdateResponse:
        """Send, with retries as requested; return the plan of the successful attempt."""
        while True:
            try:
                await Sending(self, plan, sent, begin.num_sources, deadline, chance).run()
                return plan
            except RlctlError as error:
                if plan.attempt > begin.retries:
                    raise
                again = update_pb2.RetryWeightUpdateRequest(
                    update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=plan.attempt
                )
                self.sim.observer.note(f"{begin.version} tries again: {error}")
                plan = await self.call("RetryWeightUpdate", again, 10.0)

    def _contents(
        self,
        begin: update_pb2.BeginWeightUpdateRequest,
        plan: update_pb2.BeginWeightUpdateResponse,
        tag: str,
        chance: random.Random,
    ) -> Tensors:
        """Return the tensors to send, and record the resulting model for the observer."""
        sim = self.sim
        if begin.kind == verbs_pb2.UPDATE_KIND_ADAPTER:
            sent = sim.observer.adapters[self.model, begin.adapter, tag] = contents(tag, ADAPTER_NAMES)
            return sent
        sent = whole = contents(tag)
        if begin.kind in (verbs_pb2.UPDATE_KIND_PARTIAL, verbs_pb2.UPDATE_KIND_DELTA):
            chosen = chance.sample(NAMES, chance.randint(1, len(NAMES) - 1))
            sent = {name: content for name, content in whole.items() if name in chosen}
            base = sim.observer.published.get((self.model, sim.observer.sequence(self.model)))
            if base is None:  # the base is an implicit update's, and no stage has served it yet
                raise Reason.CANCELLED.error("what it would be based on is not known")
            whole = {**base, **sent}
        elif chance.random() < 0.04:
            # Every source omits the same tensor by mistake.
            forgotten = chance.choice(NAMES)
            sent = {name: content for name, content in whole.items() if name != forgotten}
        sim.observer.published[self.model, plan.version.sequence] = whole
        return sent

    async def _renew(self, plan: update_pb2.BeginWeightUpdateResponse) -> None:
        request = update_pb2.RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
        while True:
            await asyncio.sleep(plan.lease_ttl.seconds / 3)
            with contextlib.suppress(RlctlError):
                await self.sim.network.call(self.node, COORDINATOR, "RenewLease", request, plan.lease_ttl.seconds / 3)


def _words(begin: update_pb2.BeginWeightUpdateRequest) -> str:
    kind = verbs_pb2.UpdateKind.Name(begin.kind).removeprefix("UPDATE_KIND_").lower()
    staged = ", staged" if begin.apply == verbs_pb2.APPLY_MODE_STAGED else ""
    path = update_pb2.DataPath.Name(begin.path).removeprefix("DATA_PATH_").lower()
    rolling = f", {begin.rollout.max_unavailable} at a time" if begin.rollout.max_unavailable else ""
    return f"{kind} by {path}{staged}{rolling}, {begin.num_sources} sources, quorum {begin.options.quorum}"
