"""Log probabilities of fixed prompts, for a trainer's probe and for the decode check."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rlctl.contract import decode_check
from rlctl.contract.decode_check import ATTEMPTS, OUTPUTS, TOP, Calibration, Likely
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.v1.verbs_pb2 import DecodeReport, ProbePrompt
from rlctl_servers.requests.limits import Limits, check_ids
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.admin_calls import LEAVING_S, Control
from rlctl_servers.server.state import ServerState


@dataclass(frozen=True)
class Computed:
    """Values that a server computed for a prompt.

    Attributes:
        tokens: greedy output.
        logprobs: of every token of the prompt but the first, then of the output.
        likely: the most likely tokens at these positions; empty if not requested.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    likely: Sequence[Likely] = ()


class Turn:
    """Runs one verb at a time among the verbs that lift a pause for a while and the verbs that rely on the pause."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def acquired(self, call: Call) -> AsyncIterator[None]:
        """Hold the turn inside the block. Raises DEADLINE_EXCEEDED, before anything was done."""
        try:
            async with asyncio.timeout_at(call.deadline - LEAVING_S if self._lock.locked() else None):
                await self._lock.acquire()
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("the server was busy with a probe until the time was up") from None
        try:
            yield
        finally:
            self._lock.release()


class Prober(abc.ABC):
    """Computes probes on a server without other callers."""

    def __init__(self, control: Control, state: ServerState, requests: Requests, limits: Limits, turn: Turn) -> None:
        self._control = control
        self._state = state
        self._requests = requests
        self._limits = limits
        self._turn = turn

    async def probe(self, prompts: Sequence[ProbePrompt], call: Call) -> list[ProbePrompt]:
        """Return the prompts with the log probability of every token but the first.

        A paused server computes nothing, so the pause is lifted during the probe. The output of paused requests is held
        back until ContinueGeneration, since it may come from wrong weights.

        Raises PROMPT_TOO_LONG, FIELD_INVALID, MEMORY_RELEASED, ILLEGAL_STATE, ENGINE_FAILED, DEADLINE_EXCEEDED.
        """
        for index, prompt in enumerate(prompts):
            check_ids(prompt.token_ids, self._limits, f"prompts[{index}].token_ids")
        async with self._computing(call):
            return await asyncio.gather(*(self._one(list(prompt.token_ids), call) for prompt in prompts))

    async def calibrate(self, dtype: str, call: Call) -> Calibration:
        """Measure the difference and the time of a decode check with weights in ``dtype``.

        Raises UNSUPPORTED if decode cannot be compared with prefill, and as :meth:`probe`.
        """
        reports = [await self._measure(0, call)]
        started = time.perf_counter()
        reports.append(await self._measure(1, call))
        return decode_check.calibration(reports, dtype, time.perf_counter() - started)

    async def check_decode(self, calibration: Calibration, call: Call) -> DecodeReport:
        """Compare decode with prefill. Raises DECODE_MISMATCH, and as :meth:`probe`."""
        async with self._computing(call):
            for attempt in range(ATTEMPTS):
                report = await self._measure(attempt, call)
                report.tolerance = calibration.tolerance
                if not decode_check.differs(report):
                    return report
        raise decode_check.mismatch(report)

    @contextlib.asynccontextmanager
    async def _computing(self, call: Call) -> AsyncIterator[None]:
        """Let the server compute inside the block."""
        async with self._turn.acquired(call):
            self._state.refuse_continue(updating=False)
            if not self.stopped:
                yield
                return
            self._requests.hold()
            await self.go_on(call)
            try:
                yield
            finally:
                await self.stop_again(call)

    async def _measure(self, attempt: int, call: Call) -> DecodeReport:
        longest = min(self._limits.longest_prompt, self._limits.context_length - 1)
        prompts = decode_check.prompts(self._limits.vocab_size, longest, attempt)
        top = min(TOP, self._limits.vocab_size)
        generated = await asyncio.gather(
            *(self.compute(prompt, count, call, top) for prompt, count in zip(prompts, OUTPUTS, strict=True))
        )
        if any(len(computed.tokens) != count for computed, count in zip(generated, OUTPUTS, strict=True)):
            raise Reason.CANCELLED.error("the requests of the decode check were ended early")
        sequences = [[*prompt, *computed.tokens] for prompt, computed in zip(prompts, generated, strict=True)]
        scored = await asyncio.gather(*(self.compute(sequence, 1, call, top) for sequence in sequences))
        # The first position is that of the second token, and prefill computes the first output.
        decoded = [computed.likely[len(prompt) :] for prompt, computed in zip(prompts, generated, strict=True)]
        prefilled = [computed.likely[len(prompt) : -1] for prompt, computed in zip(prompts, scored, strict=True)]
        return decode_check.compare(decoded, prefilled)

    @property
    @abc.abstractmethod
    def stopped(self) -> bool: ...

    @abc.abstractmethod
    async def go_on(self, call: Call) -> None:
        """Lift the pause for a probe or decode check."""

    @abc.abstractmethod
    async def stop_again(self, call: Call) -> None:
        """Restore the pause. Requests that a pause has ended are not ended again."""

    @abc.abstractmethod
    async def compute(self, tokens: Sequence[int], count: int, call: Call, top: int = 0) -> Computed:
        """Generate ``count`` greedy tokens after a prompt, with the ``top`` most likely tokens at each position.

        No log probability comes from a cached prefix.
        """

    async def _one(self, tokens: list[int], call: Call) -> ProbePrompt:
        logprobs = list((await self.compute(tokens, 1, call)).logprobs)[:-1]
        if len(logprobs) != len(tokens) - 1:
            raise Reason.ANSWER_INVALID.error(
                f"{self._state.product} gave {len(logprobs)} log probabilities after the first of {len(tokens)} tokens"
            )
        return ProbePrompt(token_ids=tokens, logprobs=logprobs)
