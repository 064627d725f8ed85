"""Log probabilities of fixed prompts: what a trainer compares with its own."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import ProbePrompt
from rlctl_servers.requests.limits import Limits, check_ids
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import LEAVING_S


class Turn:
    """Has one at a time of those who lift a pause for a while, and those who count on it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def taken(self, call: Call) -> AsyncIterator[None]:
        """Raises DEADLINE_EXCEEDED: nothing was done."""
        try:
            async with asyncio.timeout_at(call.deadline - LEAVING_S if self._lock.locked() else None):
                await self._lock.acquire()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("a probe, or what it waits for, kept the server") from None
        try:
            yield
        finally:
            self._lock.release()


class Prober(abc.ABC):
    """Computes probes on one server, which nobody else sends requests to."""

    def __init__(self, product: str, requests: Requests, limits: Limits, turn: Turn) -> None:
        self._turn = turn
        self._product = product
        self._requests = requests
        self._limits = limits

    async def probe(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        """The prompts with the log probability of every token but the first.

        A server computes nothing while it is paused, so it goes on for that long. What the requests that a pause keeps
        generate meanwhile is told to nobody until ContinueGeneration: it may come from weights that are found wrong.

        Raises PROMPT_TOO_LONG, FIELD_INVALID, MEMORY_RELEASED, ILLEGAL_STATE, ENGINE_FAILED, DEADLINE_EXCEEDED.
        """
        async with self._turn.taken(call):
            return await self._probe(prompts, call)

    async def _probe(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        self.refuse()
        for index, prompt in enumerate(prompts):
            check_ids(prompt.token_ids, self._limits, f"prompts[{index}].token_ids")
        if not self.stopped:
            return await self._compute(prompts, call)
        self._requests.hold()
        await self.go_on(call)
        try:
            return await self._compute(prompts, call)
        finally:
            await self.stop_again(call)

    @property
    @abc.abstractmethod
    def stopped(self) -> bool:
        """Whether it is paused."""

    @abc.abstractmethod
    def refuse(self) -> None:
        """Raise why it cannot go on."""

    @abc.abstractmethod
    async def go_on(self, call: Call) -> None:
        """Lift the pause."""

    @abc.abstractmethod
    async def stop_again(self, call: Call) -> None:
        """Pause as before; requests that a pause ended are not ended again."""

    @abc.abstractmethod
    async def logprobs(self, tokens: list[int], call: Call) -> list[float]:
        """The log probability of every token but the first."""

    async def _compute(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        return await asyncio.gather(*(self._one(list(prompt.token_ids), call) for prompt in prompts))

    async def _one(self, tokens: list[int], call: Call) -> ProbePrompt:
        found = await self.logprobs(tokens, call)
        if len(found) != len(tokens) - 1:
            raise Reason.ANSWER_INVALID.error(
                f"{self._product} gave {len(found)} log probabilities after the first of {len(tokens)} tokens"
            )
        return ProbePrompt(token_ids=tokens, logprobs=found)
