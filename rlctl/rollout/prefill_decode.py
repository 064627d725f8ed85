"""A request to a pair: the same one to a prefill and to a decode stage, at one time.

The decode stage generates; what the prefill stage says is the prompt's log probabilities, and why there is nothing to
decode. The two find each other by the request's bootstrap fields, whose names and meaning are SGLang's: so the same
requests go to pairs of its servers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import MOST_ROOM
from rlctl.rollout.stage_stream import Parts
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
)

CAUSE_S = 1.0
"""How long the prefill stage may take to say why its KV entries did not come, once the decode stage has missed them."""


def halves(request: GenerateRequest, prefill: Stage, decode: Stage) -> GenerateRequest:
    """The request for both, which are at one version, that of the prefill stage. Its room is drawn anew: it is all that
    one must know to be handed the entries.
    """
    asked = GenerateRequest()
    asked.CopyFrom(request)
    asked.model = decode.registration.model
    asked.bootstrap_host = prefill.registration.bootstrap_host
    asked.bootstrap_port = prefill.registration.bootstrap_port
    asked.bootstrap_version_seq = prefill.report.weight_version.sequence
    for adapter in prefill.report.adapters:
        if adapter.name == request.adapter:
            asked.bootstrap_adapter_digest = adapter.digest
    # SGLang counts on from it, a room for each sample.
    asked.bootstrap_room = secrets.randbelow(MOST_ROOM - (request.sampling_params.n or 1))
    return asked


class _Prompt:
    """What the prefill stage has said: its first message with the prompt's log probabilities, and its end."""

    def __init__(self) -> None:
        self.head = GenerateResponse()
        self.aborted: FinishReason | None = None

    async def read(self, parts: Parts) -> None:
        """Take all of it in. Raises what the stage fails with."""
        async with aclosing(parts):
            async for part in parts:
                if not self.head.rid:
                    self.head.CopyFrom(part)
                    del self.head.samples[:]
                for sample in part.samples:
                    if sample.finish_reason.type == FINISH_TYPE_ABORT:
                        self.aborted = sample.finish_reason


async def together(
    request: GenerateRequest,
    prefill: Parts,
    decode: Parts,
    met_at_prefill: Callable[[], None],
) -> AsyncGenerator[GenerateResponse, None]:
    """What both generate. A prompt that was aborted ends as its samples would. Raises the failure of either;
    ``met_at_prefill`` is called before one that is the prefill stage's.
    """
    prompt = _Prompt()
    computing = asyncio.create_task(prompt.read(prefill))
    first = asyncio.create_task(_first(decode))
    try:
        await asyncio.wait({first, computing}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and not prompt.aborted and not _failed(computing):
            await asyncio.wait({first})  # the prompt is computed
        missed = _failed(first, Reason.HANDOVER_FAILED)
        if missed:
            await asyncio.wait({computing}, timeout=CAUSE_S)
        nothing = not first.done() or _failed(first)
        if nothing and (prompt.aborted or _failed(computing) or missed):
            met_at_prefill()
        if nothing and prompt.aborted:
            yield _cut(request, prompt.aborted, prompt.head)
            return
        if nothing and _failed(computing):
            await computing
        part = await first
        if part is not None and request.HasField("logprob_start_len") and request.logprob_start_len >= 0:
            await asyncio.wait({computing})
            if _failed(computing) or prompt.aborted:
                met_at_prefill()
            await computing
            if prompt.aborted:  # before it had said them
                yield _cut(request, prompt.aborted, prompt.head)
                return
            scores = [*prompt.head.input_logprobs, *part.input_logprobs]
            del part.input_logprobs[:]
            part.input_logprobs.extend(scores)
        if part is not None:
            yield part
        async for part in decode:
            yield part
    finally:
        for task in (computing, first):
            task.cancel()
        await asyncio.gather(computing, first, return_exceptions=True)
        await decode.aclose()


async def _first(parts: Parts) -> GenerateResponse | None:
    return await anext(parts, None)


def _failed(task: asyncio.Task[Any], reason: Reason | None = None) -> bool:
    """Whether it has ended with an error, or with this one."""
    error = task.exception() if task.done() else None
    return error is not None and (reason is None or (isinstance(error, RlctlError) and error.reason is reason))


def _cut(request: GenerateRequest, why: FinishReason, head: GenerateResponse) -> GenerateResponse:
    """All samples, ended by an abort before their first token; ``head``: the prefill stage's first message."""
    count = request.sampling_params.n or 1
    cut = GenerateResponse(rid=request.rid, samples=[Sample(index=i, finish_reason=why) for i in range(count)])
    if head.HasField("weight_version"):
        cut.weight_version.CopyFrom(head.weight_version)
    return cut
