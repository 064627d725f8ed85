"""A trainer that knows engines and neither updates nor their names, as those that speak to SGLang do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any

from rlctl.errors import RlctlError
from rlctl.simulation.clients import MODES, Caller
from rlctl.simulation.fleet import Fleet
from rlctl.simulation.holding import NAMES, contents
from rlctl.simulation.world import Node
from rlctl.v1 import update_pb2, verbs_pb2
from rlctl.v1.common_pb2 import RequestHeader, Target

CALL_S = 15.0


class Nameless(Caller):
    """Pauses, writes over a group of its own, one call for every engine, and goes on; or is gone half-way."""

    def __init__(self, fleet: Fleet, node: Node) -> None:
        super().__init__(fleet, node)
        self._busy = asyncio.Lock()

    async def act(self, chance: random.Random) -> None:
        """One update after the other: two such trainers cannot be told apart from one of several sources."""
        async with self._busy:
            await self._act(chance)

    async def _act(self, chance: random.Random) -> None:
        """One update, whatever comes of it."""
        model = chance.choice(sorted(self.fleet.models))
        tag = f"{model}-nameless-{self.sim.world.new_id()[-6:]}"
        paused = chance.random() < 0.8
        with contextlib.suppress(RlctlError):
            if paused:
                pause = verbs_pb2.PauseGenerationRequest(mode=chance.choice(MODES), header=_of(model))
                await self.verb(pause, CALL_S)
            begin = update_pb2.BeginWeightUpdateRequest(model=model, implicit=True)
            plan = await self.call("BeginWeightUpdate", begin, CALL_S)
            self.sim.observer.published[model, plan.version.sequence] = contents(tag)
            self.sim.observer.nameless.update(contents(tag).values())
            self.sim.observer.note(f"a nameless trainer writes {tag}")
            await self._write(plan, tag, chance)
            end = chance.random()
            if end < 0.5:
                commit = update_pb2.CommitWeightUpdateRequest(header=_of(model), version=tag)
                await self.call("CommitWeightUpdate", commit, 60.0)
            elif end < 0.9:
                await self.verb(verbs_pb2.ContinueGenerationRequest(header=_of(model)), 60.0)
        if paused:
            with contextlib.suppress(RlctlError):
                await self.verb(verbs_pb2.ContinueGenerationRequest(header=_of(model)), CALL_S)

    async def _write(self, plan: update_pb2.BeginWeightUpdateResponse, tag: str, chance: random.Random) -> None:
        """Form a group and send everything over it, unless something forgets a part."""
        ranks = {target.slot: len(target.workers) for target in plan.targets}
        order = chance.sample(sorted(ranks), len(ranks))
        world_size = 1 + sum(ranks.values())
        forgotten = chance.choice(NAMES) if chance.random() < 0.1 else ""

        def join(slot: str) -> verbs_pb2.InitWeightsUpdateGroupRequest:
            return verbs_pb2.InitWeightsUpdateGroupRequest(
                header=RequestHeader(for_slot=slot, unkeyed=True),
                master_address="nameless",
                master_port=1,
                world_size=world_size,
                rank_offset=1 + sum(ranks[other] for other in order[: order.index(slot)]),
                group_name=tag,
                backend="gloo",
            )

        def take(slot: str, name: str) -> verbs_pb2.UpdateWeightsFromDistributedRequest:
            bucket = verbs_pb2.TensorBucket(names=[name], dtypes=["torch.float32"])
            bucket.shapes.add().dims.append(1)
            header = RequestHeader(for_slot=slot, unkeyed=True)
            return verbs_pb2.UpdateWeightsFromDistributedRequest(header=header, group_name=tag, buckets=[bucket])

        fabric, together = self.sim.fabric, chance.random() < 0.7
        await _all(fabric.join(self.node, tag, 0, world_size, CALL_S), *(self.verb(join(s), CALL_S) for s in order))
        for name, content in contents(tag).items():
            if name == forgotten:
                continue
            sending = fabric.send(self.node, tag, {name: content}, CALL_S)
            writes = [take(slot, name) for slot in order]
            if together:
                await _all(sending, *(self.verb(write, CALL_S) for write in writes))
            else:
                await _all(sending, self._one_by_one(writes))

    async def _one_by_one(self, writes: list[verbs_pb2.UpdateWeightsFromDistributedRequest]) -> None:
        for write in writes:
            await self.verb(write, CALL_S)


async def _all(*works: Coroutine[Any, Any, Any]) -> None:
    """All of them, or what the first one fails with; the others are given up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _of(model: str) -> RequestHeader:
    return RequestHeader(target=Target(model=model))
