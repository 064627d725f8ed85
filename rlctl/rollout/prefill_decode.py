"""Sends one request to a prefill stage and a decode stage at the same time.

The decode stage generates. The prefill stage supplies the prompt's log probabilities, and the cause if decoding cannot
start. The stages find each other by the bootstrap fields of the request. These fields are SGLang's, so the same
requests work with pairs of SGLang servers.
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
"""Seconds to wait for the prefill stage's error, after the decode stage has missed the KV entries."""


def halves(request: GenerateRequest, prefill: Stage, decode: Stage) -> GenerateRequest:
    """Return the request for both stages, at the version of the prefill stage.

    The bootstrap room is random, because knowledge of the room is enough to receive the KV entries.
    """
    pair_request = GenerateRequest()
    pair_request.CopyFrom(request)
    pair_request.model = decode.registration.model
    pair_request.bootstrap_host = prefill.registration.bootstrap_host
    pair_request.bootstrap_port = prefill.registration.bootstrap_port
    pair_request.bootstrap_version_seq = prefill.report.weight_version.sequence
    for adapter in prefill.report.adapters:
        if adapter.name == request.adapter:
            pair_request.bootstrap_adapter_digest = adapter.digest
    # SGLang numbers the rooms of further samples from here.
    pair_request.bootstrap_room = secrets.randbelow(MOST_ROOM - (request.sampling_params.n or 1))
    return pair_request


class _Prompt:
    """Output of the prefill stage: the first message, with the prompt's log probabilities, and an abort."""

    def __init__(self) -> None:
        self.head = GenerateResponse()
        self.aborted: FinishReason | None = None

    async def read(self, parts: Parts) -> None:
        """Read all messages. Raises the failure of the stage."""
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
    """Yield the messages of both stages as one stream.

    After an abort of the prompt all samples end as aborted. Raises the failure of either stage. ``met_at_prefill`` is
    called before a failure, an abort or a missed handover of the prefill stage.
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
            if prompt.aborted:  # before its log probabilities
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
    """Return whether the task ended with an error, or with an error of this reason."""
    error = task.exception() if task.done() else None
    return error is not None and (reason is None or (isinstance(error, RlctlError) and error.reason is reason))


def _cut(request: GenerateRequest, why: FinishReason, head: GenerateResponse) -> GenerateResponse:
    """Return all samples aborted before their first token. ``head`` is the first message of the prefill stage."""
    count = request.sampling_params.n or 1
    response = GenerateResponse(rid=request.rid, samples=[Sample(index=i, finish_reason=why) for i in range(count)])
    if head.HasField("weight_version"):
        response.weight_version.CopyFrom(head.weight_version)
    return response
