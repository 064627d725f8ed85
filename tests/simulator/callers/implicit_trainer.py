"""A trainer that calls engines without naming updates, like SGLang's clients."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine

from google.protobuf.message import Message

from rlctl.contract.errors import RlctlError
from rlctl.v1 import update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import RequestHeader, Target
from tests.simulator.callers.operators_and_clients import MODES, Caller
from tests.simulator.callers.trainer_ranks import all_of
from tests.simulator.model.rank_weights import ADAPTER_NAMES, NAMES, contents
from tests.simulator.ports.process_groups import Tensors
from tests.simulator.ports.shared_memory import TRAINERS_HOST
from tests.simulator.ports.virtual_time import Node
from tests.simulator.processes.fleet import Fleet

CALL_S = 15.0


class Nameless(Caller):
    """Pauses, writes with one call for every engine, and continues; or stops half-way."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        super().__init__(fleet, node)
        self._busy = asyncio.Lock()

    async def act(self, chance: random.Random) -> None:
        """Do one work at a time: two such trainers look like one trainer with several sources."""
        works: tuple[Callable[[random.Random], Coroutine[None, None, None]], ...] = (
            *(self._update,) * 6,
            self._from_disk,
            self._adapter,
        )
        async with self._busy:
            await chance.choice(works)(chance)

    async def _update(self, chance: random.Random) -> None:
        """Run an update, with any outcome."""
        model = chance.choice(sorted(self.fleet.models))
        tag = self._tag(model)
        paused = chance.random() < 0.8
        with contextlib.suppress(RlctlError):
            if paused:
                pause = verbs_pb2.PauseGenerationRequest(mode=chance.choice(MODES), header=_of(model))
                await self.verb(pause, CALL_S)
            ranks = {slot: self.sim.slots[slot].ranks for slot in self.fleet.models[model]}
            way, sequence = self.sim.world.chance(f"end of {tag}"), 0
            partial = False
            if chance.random() < 0.7:
                begin = update_pb2.BeginWeightUpdateRequest(
                    model=model, implicit=True, may_be_partial=way.random() < 0.5
                )
                sequence, ranks = await self._begin(begin, tag, chance)
                partial = begin.may_be_partial and way.random() < 0.5
            self.sim.observer.nameless.update(contents(tag).values())
            self.sim.observer.note(f"a nameless trainer writes {tag}, {'' if paused else 'not '}paused")
            writing = _Writing(self, tag, ranks, chance, parts=way if partial else None)
            if writing.says_partial:
                self.sim.observer.may_end_early[model] = sequence
            await self._send(writing)
            self.sim.observer.may_end_early.pop(model, None)
            end = chance.random()
            if writing.omits_as_partial or (partial and end < 0.9):
                # The tensors that were not written are the base version's: the first stage that serves the version
                # defines the content for all.
                self.sim.observer.published.pop((model, sequence), None)
            if partial and end < 0.9:
                commit = update_pb2.CommitWeightUpdateRequest(header=self._at(model, chance), partial=True)
                await self.call("CommitWeightUpdate", commit, 60.0)
            elif end < 0.5:
                commit = update_pb2.CommitWeightUpdateRequest(header=self._at(model, chance), version=tag)
                await self.call("CommitWeightUpdate", commit, 60.0)
            elif end < 0.9:
                await self.verb(verbs_pb2.ContinueGenerationRequest(header=_of(model)), 60.0)
        if paused:
            with contextlib.suppress(RlctlError):
                await self.verb(verbs_pb2.ContinueGenerationRequest(header=_of(model)), CALL_S)

    async def _begin(
        self, begin: update_pb2.BeginWeightUpdateRequest, tag: str, chance: random.Random
    ) -> tuple[int, dict[str, int]]:
        """Open an update, once or through several engines; return its sequence, and the ranks of its targets."""
        plan = None
        for _ in range(chance.choice((1, 1, 2))):
            begin.header.CopyFrom(self._at(begin.model, chance))
            plan = await self.call("BeginWeightUpdate", begin, CALL_S)
        assert plan is not None
        self.sim.observer.published[begin.model, plan.version.sequence] = contents(tag)
        return plan.version.sequence, {target.slot: len(target.workers) for target in plan.targets}

    async def _send(self, writing: _Writing) -> None:
        slots = [self.sim.slots[slot] for slot in writing.order]
        if all(slot.host == TRAINERS_HOST for slot in slots) and writing.chance.random() < 0.6:
            await writing.out_of_memory()
        else:
            await writing.over_group()

    async def _from_disk(self, chance: random.Random) -> None:
        """Let every engine read a checkpoint."""
        model = chance.choice(sorted(self.fleet.models))
        tag = self._tag(model)
        self.sim.disks[tag] = contents(tag)

        def read(slot: str) -> Message:
            return verbs_pb2.UpdateWeightsFromDiskRequest(header=_through(slot), model_path=tag, weight_version=tag)

        await self._everywhere(model, read)

    async def _adapter(self, chance: random.Random) -> None:
        """Let every engine load an adapter; later, perhaps, unload the adapter."""
        model, name = chance.choice(sorted(self.fleet.models)), chance.choice(("math", "code"))
        tag = self._tag(model)
        self.sim.disks[tag] = self.sim.observer.adapters[model, name, tag] = contents(tag, ADAPTER_NAMES)

        def load(slot: str) -> Message:
            return verbs_pb2.LoadAdapterRequest(
                header=_through(slot), name=name, path=tag, version=tag, abort_requests=True
            )

        def unload(slot: str) -> Message:
            return verbs_pb2.UnloadAdapterRequest(header=_through(slot), name=name, abort_requests=True)

        await self._everywhere(model, load)
        if chance.random() < 0.5:
            await self._everywhere(model, unload)

    async def _everywhere(self, model: str, request: Callable[[str], Message]) -> None:
        with contextlib.suppress(RlctlError):
            await all_of(*(self.verb(request(slot), 40.0) for slot in list(self.fleet.models[model])))

    def _tag(self, model: str) -> str:
        return f"{model}-nameless-{self.sim.world.new_id()[-6:]}"

    def _at(self, model: str, chance: random.Random) -> RequestHeader:
        """Return a header with the model, or with one of its engines."""
        if chance.random() < 0.5:
            return _of(model)
        return RequestHeader(for_slot=chance.choice(self.fleet.models[model]))


class _Writing:
    """The tensors of an update, and the way of sending."""

    def __init__(
        self,
        trainer: Nameless,
        tag: str,
        ranks: dict[str, int],
        chance: random.Random,
        parts: random.Random | None = None,
    ) -> None:
        """``parts``: only some tensors are written, drawn from ``parts``."""
        self._trainer = trainer
        self._sim = trainer.sim
        self._tag = tag
        self._ranks = ranks
        self.chance = chance
        self.order = chance.sample(sorted(ranks), len(ranks))
        self._tensors = contents(tag)
        if chance.random() < 0.1:
            del self._tensors[chance.choice(NAMES)]  # a tensor is omitted by mistake
        elif parts is not None:
            kept = parts.sample(NAMES, parts.randint(1, len(NAMES)))
            self._tensors = {name: content for name, content in self._tensors.items() if name in kept}
        self._kind = verbs_pb2.UPDATE_KIND_UNSPECIFIED
        if chance.random() < 0.1:
            self._kind = chance.choice((verbs_pb2.UPDATE_KIND_FULL, verbs_pb2.UPDATE_KIND_PARTIAL))
        self.says_partial = self._kind == verbs_pb2.UPDATE_KIND_PARTIAL
        self.omits_as_partial = self.says_partial and len(self._tensors) < len(NAMES)
        self._label = tag if chance.random() < 0.2 else ""
        self._together = chance.random() < 0.7

    async def over_group(self) -> None:
        """Form a group and send over the group, tensor by tensor or in one request."""
        world_size = 1 + sum(self._ranks.values())
        fabric, node = self._sim.fabric, self._trainer.node
        mistaken = self.chance.choice(self.order) if self.chance.random() < 0.1 else ""

        def join(slot: str) -> verbs_pb2.InitWeightsUpdateGroupRequest:
            before = self.order[: self.order.index(slot)]
            return verbs_pb2.InitWeightsUpdateGroupRequest(
                header=_through(slot),
                master_address="nameless",
                master_port=2 if slot == mistaken else 1,
                world_size=world_size,
                rank_offset=1 + sum(self._ranks[other] for other in before),
                group_name=self._tag,
                backend="gloo",
            )

        joining = (self._trainer.verb(join(slot), CALL_S) for slot in self.order)
        await all_of(fabric.join(node, self._tag, 0, world_size, CALL_S), *joining)
        for part in self._parts():
            take = verbs_pb2.UpdateWeightsFromDistributedRequest(
                group_name=self._tag, kind=self._kind, weight_version=self._label
            )
            for name in part:
                bucket = take.buckets.add(names=[name], dtypes=["torch.float32"])
                bucket.shapes.add().dims.append(1)
            await all_of(self._broadcast(part), self._written(take))

    async def _broadcast(self, part: Tensors) -> None:
        for name, content in part.items():
            await self._sim.fabric.send(self._trainer.node, self._tag, {name: content}, CALL_S)

    async def out_of_memory(self) -> None:
        """Announce the content of a segment, tensor by tensor or in one request."""
        for part in self._parts():
            segment = self._sim.memory.write(self._trainer.node, self._tag, part, CALL_S)
            await self._written(
                verbs_pb2.UpdateWeightsFromTensorRequest(
                    segments=[segment], kind=self._kind, weight_version=self._label
                )
            )

    def _parts(self) -> list[Tensors]:
        if self.chance.random() < 0.3:
            return [self._tensors]
        return [{name: content} for name, content in self._tensors.items()]

    async def _written(
        self, take: verbs_pb2.UpdateWeightsFromDistributedRequest | verbs_pb2.UpdateWeightsFromTensorRequest
    ) -> None:
        """Send a write to every engine, at once or in turn."""
        owns = [type(take).FromString(take.SerializeToString()) for _ in self.order]
        for own, slot in zip(owns, self.order, strict=True):
            own.header.CopyFrom(_through(slot))
        if self._together:
            await all_of(*(self._trainer.verb(own, CALL_S) for own in owns))
        else:
            for own in owns:
                await self._trainer.verb(own, CALL_S)


def _through(slot: str) -> RequestHeader:
    """Return the header of a call to one engine that belongs to a call to all."""
    return RequestHeader(for_slot=slot, unkeyed=True)


def _of(model: str) -> RequestHeader:
    return RequestHeader(target=Target(model=model))
