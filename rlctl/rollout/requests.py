"""Generation requests of the SDK, and single requests to routable stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypedDict, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_levels
from rlctl.rollout.dispatch import Dispatch, Lines
from rlctl.rollout.picking.policies import RoundRobin
from rlctl.rollout.picking.router import REFUSALS, Router, Wanted
from rlctl.v1.rollout_pb2 import GenerateRequest, GenerateResponse, SamplingParams

T = TypeVar("T")

GENERATE_S = 600.0
"""Default time limit of a request, in seconds."""

ELSEWHERE = (*REFUSALS, Reason.UNREACHABLE, Reason.HANDOVER_FAILED)
"""Errors after which a request is sent again. ENGINE_FAILED is excluded: the request may fail every engine."""


class Sampling(TypedDict, total=False):
    """Fields of SamplingParams; rollout.proto has meaning and defaults. ``stop`` may be a text."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    n: int
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float


class Generator:
    """Sends requests to routable stages."""

    def __init__(self, lines: Lines) -> None:
        self._dispatch = Dispatch(lines, Router(RoundRobin(), prefill=RoundRobin()))
        self._metadata = lines.metadata

    async def generate(self, request: GenerateRequest, timeout_s: float, *, slot: str = "") -> GenerateResponse:
        """Return the samples of a prompt.

        Waits at most ``timeout_s`` for a routable stage, or for the stage in ``slot``. Raises MODEL_NOT_FOUND,
        STAGE_NOT_FOUND, NO_ROUTABLE_STAGE, and the stage's refusal.
        """
        loop = asyncio.get_running_loop()
        deadline, criteria = loop.time() + timeout_s, _wanted(request, slot)
        await self._dispatch.lines.check_slot(slot, timeout_s)
        while True:
            with await self._dispatch.attempt(lambda: criteria, deadline, timeout_s) as attempt:
                try:
                    return await attempt.whole(request, deadline, self._metadata)
                except RlctlError as failure:
                    if not attempt.failed(failure) or failure.reason not in ELSEWHERE:
                        raise

    async def stream(
        self, request: GenerateRequest, timeout_s: float, *, slot: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yield new output. After the first message a failure is raised, and the request is not repeated elsewhere."""
        loop = asyncio.get_running_loop()
        deadline, criteria = loop.time() + timeout_s, _wanted(request, slot)
        await self._dispatch.lines.check_slot(slot, timeout_s)
        while True:
            with await self._dispatch.attempt(lambda: criteria, deadline, timeout_s) as attempt:
                started = False
                try:
                    async with aclosing(attempt.stream(request, deadline, self._metadata)) as parts:
                        async for response in parts:
                            if not started:
                                attempt.answered()
                            started = True
                            yield response
                except RlctlError as failure:
                    if not attempt.failed(failure) or started or failure.reason not in ELSEWHERE:
                        raise
                else:
                    return


def _wanted(request: GenerateRequest, slot: str) -> Wanted:
    return Wanted(
        model=request.model,
        adapter=request.adapter,
        slot=slot,
        floor=request.min_version_seq,
        session=request.session_id,
    )


def build_request(
    prompt: str | Sequence[int],
    sampling: Mapping[str, Any],
    **fields: Any,
) -> GenerateRequest:
    """Build a request from Python values.

    Raises FIELD_INVALID for an unknown or unsuitable field or sampling parameter, and for an invalid prompt.
    """
    check_levels(fields.get("engine_fields") or {})
    if isinstance(stop := sampling.get("stop"), str):  # a str is also a sequence of characters
        sampling = {**sampling, "stop": [stop]}
    try:
        params = SamplingParams(**sampling)
        request = GenerateRequest(sampling_params=params, **{k: v for k, v in fields.items() if v is not None})
    except (TypeError, ValueError) as error:
        _refuse_unknown(sampling)
        field = _misfit(SamplingParams, sampling, "sampling_params.") or _misfit(GenerateRequest, fields, "")
        raise Reason.FIELD_INVALID.error(str(error), field=field) from None
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.input_ids.SetInParent()
        request.input_ids.ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise Reason.FIELD_INVALID.error(f"a prompt is a text or token ids: {error}", field="input_ids") from None
    return request


def batch_of(prompts: Iterable[T]) -> list[T]:
    """Return the prompts as a list. Raises FIELD_INVALID for a single text: its characters are no prompts."""
    if isinstance(prompts, str):
        raise Reason.FIELD_INVALID.error("prompts must be a list, not one text", field="prompts")
    return list(prompts)


def _refuse_unknown(sampling: Mapping[str, Any]) -> None:
    fields = SamplingParams.DESCRIPTOR.fields_by_name
    for name in sampling:
        if name not in fields:
            raise Reason.FIELD_INVALID.error(
                f"there is no sampling parameter {name!r}; there are: {', '.join(fields)}",
                field=f"sampling_params.{name}",
            )


def _misfit(kind: Callable[..., object], values: Mapping[str, Any], where: str) -> str:
    """Return the first name with a value that the message cannot hold, or ""."""
    for name, value in values.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError):
            return where + name
    return ""
