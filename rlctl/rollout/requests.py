"""Generation requests of the SDK, and single requests to routable stages in turn."""

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
"""How long a request may take when nobody says."""

ELSEWHERE = (*REFUSALS, Reason.UNREACHABLE, Reason.HANDOVER_FAILED)
"""After these the request is sent again; an engine that failed may do so at the same request everywhere."""


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams (rollout.proto), where their meaning and defaults stand. ``stop`` may be a text."""

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
        """The samples of one prompt. Waits for a routable stage (for this one) no longer than ``timeout_s``.

        Raises MODEL_NOT_FOUND, STAGE_NOT_FOUND, NO_ROUTABLE_STAGE, and what the stage refuses with.
        """
        loop = asyncio.get_running_loop()
        deadline, wanted = loop.time() + timeout_s, _wanted(request, slot)
        await self._dispatch.lines.check_slot(slot, timeout_s)
        while True:
            with await self._dispatch.attempt(lambda: wanted, deadline, timeout_s) as attempt:
                try:
                    return await attempt.whole(request, deadline, self._metadata)
                except RlctlError as failure:
                    if not attempt.failed(failure) or failure.reason not in ELSEWHERE:
                        raise

    async def stream(
        self, request: GenerateRequest, timeout_s: float, *, slot: str = ""
    ) -> AsyncGenerator[GenerateResponse, None]:
        """What is new, as it comes. Once something came, a failure is raised, not repeated elsewhere."""
        loop = asyncio.get_running_loop()
        deadline, wanted = loop.time() + timeout_s, _wanted(request, slot)
        await self._dispatch.lines.check_slot(slot, timeout_s)
        while True:
            with await self._dispatch.attempt(lambda: wanted, deadline, timeout_s) as attempt:
                begun = False
                try:
                    async with aclosing(attempt.stream(request, deadline, self._metadata)) as parts:
                        async for response in parts:
                            if not begun:
                                attempt.answered()
                            begun = True
                            yield response
                except RlctlError as failure:
                    if not attempt.failed(failure) or begun or failure.reason not in ELSEWHERE:
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
    """A request from Python values. Raises FIELD_INVALID for a field or a sampling parameter that does not exist or
    fit, and for a prompt that is none.
    """
    check_levels(fields.get("engine_fields") or {})
    if isinstance(stop := sampling.get("stop"), str):  # also a sequence, of its characters
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
    """The prompts of a call, gone through once. Raises FIELD_INVALID for one text: its characters are no prompts."""
    if isinstance(prompts, str):
        raise Reason.FIELD_INVALID.error("one text is given in place of a list of prompts", field="prompts")
    return list(prompts)


def _refuse_unknown(sampling: Mapping[str, Any]) -> None:
    known = SamplingParams.DESCRIPTOR.fields_by_name
    for name in sampling:
        if name not in known:
            raise Reason.FIELD_INVALID.error(
                f"there is no sampling parameter {name!r}; there are: {', '.join(known)}",
                field=f"sampling_params.{name}",
            )


def _misfit(kind: Callable[..., object], values: Mapping[str, Any], where: str) -> str:
    """The first of the values that its field of a message cannot hold; "": none."""
    for name, value in values.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError):
            return where + name
    return ""
