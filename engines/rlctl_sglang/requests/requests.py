"""Requests in SGLang's own format, one for each sample."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.requests.cache_salts import salt_of, with_own
from rlctl_servers.requests.limits import refused
from rlctl_servers.requests.requests import ABORT_CALL_S
from rlctl_servers.server.http import Answer, Http
from rlctl_servers.updates.version_labels import Stamps

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_pair_adapter
from rlctl.v1.rollout_pb2 import (
    FINISH_TYPE_ABORT,
    FINISH_TYPE_LENGTH,
    FINISH_TYPE_STOP,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Sample,
    TokenLogprob,
)
from rlctl_sglang.requests.bodies import SALT, Limits, bodies, has_grammar

_FINISH = {"length": FINISH_TYPE_LENGTH, "stop": FINISH_TYPE_STOP, "abort": FINISH_TYPE_ABORT}

_ABORTED, _HANDOVER = "Aborted by AbortReq.", "KVTransferError"
"""Messages of a sample that ends with status 500 at a server of a pair. The sample was aborted while its KV entries
were under way, or the entries did not come (``prepare_abort`` in srt/disaggregation, 0.5.23).
"""


class Native:
    """SGLang's /generate and /abort_request, as :class:`rlctl_servers.requests.requests.Dialect`.

    Attributes:
        incremental: the server sends only the new part of a text.
    """

    product = "SGLang"

    def __init__(
        self,
        http: Http,
        limits: Limits,
        stamps: Stamps,
        adapters: LoraTable,
        *,
        incremental: bool,
        stopped: Callable[[], bool],
        admit: Callable[[GenerateRequest], None],
        admit_passed: Callable[[bool], None],
    ) -> None:
        """``stopped``: whether the server is paused, or is about to be. ``admit``: raises if a request must wait.
        ``admit_passed``: the same for a request that is passed on, with a grammar or without.
        """
        self.adapters = adapters
        self.http = http
        self.stamps = stamps
        self.incremental = incremental
        self._limits = limits
        self._stopped = stopped
        self.admit = admit
        self._admit_passed = admit_passed

    def admit_passed(self, *, prepared: bool) -> None:
        """Raise if a request that is passed on must not be sent now."""
        self._admit_passed(prepared)

    def new_rid(self) -> str:
        """Return an unused id. All ids have the same length, since SGLang ends requests by the beginnings of ids."""
        return uuid.uuid4().hex

    def prepares(self, request: GenerateRequest) -> bool:
        """Return whether SGLang compiles a grammar for the request.

        Such requests wait apart, and a paused SGLang does not look at them: caches cannot be flushed then, nor the
        requests be ended (``grammar_queue``, 0.5.23).
        """
        return has_grammar(request)

    def ends(self, *, heard: bool) -> bool:
        """Return whether a sample can be ended now. ``heard``: SGLang has sent output of the sample.

        The abort of a request that a pause holds back has no effect, and makes SGLang ignore every later abort
        (``abort_sent`` in its tokenizer_manager.py). Closing the connection ends the request.
        """
        return heard or not self._stopped()

    async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[_Reading]:
        """Return the samples of a request. Raises ADAPTER_NOT_FOUND, and the errors of :func:`~.bodies.bodies`."""
        if request.adapter:
            self.adapters.find(request.adapter, "adapter")
        sample_bodies = bodies(request, engine_rids, self._limits)
        return [_Reading(self, index, request, body) for index, body in enumerate(sample_bodies)]

    async def end(self, engine_rids: Sequence[str] | None) -> None:
        """End samples early; None: all samples of the server."""
        messages = [{"abort_all": True}] if engine_rids is None else [{"rid": rid} for rid in engine_rids]
        await asyncio.gather(*map(self._tell, messages))

    async def _tell(self, body: dict[str, Any]) -> None:
        try:
            answer = await self.http.call("/abort_request", body, timeout_s=ABORT_CALL_S)
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("SGLang did not take the abort in time") from None
        if answer.status != 200:
            raise Reason.ENGINE_FAILED.error(f"SGLang refused the abort: {answer.message}")


class _Reading:
    def __init__(self, native: Native, index: int, request: GenerateRequest, body: dict[str, Any]) -> None:
        self._native = native
        self._stamps = native.stamps
        self._since = native.stamps.present
        # SGLang's own meta information, if requested.
        self._meta: dict[str, Any] | None = {} if request.return_engine_meta else None
        self._index = index
        self._request = request
        self._body = body
        self._head = index == 0
        self._tokens = 0
        self._text = 0
        self._over = False
        self._adapter_version = ""

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def over(self) -> bool:
        return self._over

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        try:
            with self._native.adapters.using(self._request.adapter) as adapter:
                if adapter is not None:
                    check_pair_adapter(self._request, adapter.info.digest)
                    self._body["lora_path"], self._adapter_version = adapter.name, adapter.info.version
                self._since = self._stamps.present
                salt = salt_of(self._since, adapter.name if adapter is not None else "")
                self._body[SALT] = with_own(salt, self._body.get(SALT))
                async with aclosing(self._native.http.stream("/generate", self._body)) as stream:
                    async for event in stream:
                        yield event
        except RlctlError as error:
            raise _typed(error) from error

    def take(self, event: dict[str, Any]) -> GenerateResponse:
        """Return the new part of an event. The first event of the first sample includes the facts of the prompt."""
        if "meta_info" not in event:
            raise _refused(Answer(400, event).message, 400)
        finish = event["meta_info"].get("finish_reason")
        if finish and finish.get("type") == "abort" and not self._tokens and has_grammar(self._request):
            # Aborted while its grammar was compiled: SGLang then computes a prompt and a token of no request.
            self._over = True
            return GenerateResponse(samples=[Sample(index=self._index, finish_reason=_finish(finish))])
        response = GenerateResponse(samples=[self._sample(event)])
        if self._head:
            self._head = False
            _head(response, event, self._request)
        return response

    def _sample(self, event: dict[str, Any]) -> Sample:
        meta = event["meta_info"]
        count = int(meta.get("completion_tokens") or 0)
        new_count = max(count - self._tokens, 0)
        ids = list(event.get("output_ids") or ())[-new_count:] if new_count else []
        text = event.get("text") or ""
        if not self._native.incremental:
            text, self._text = text[self._text :], max(self._text, len(text))
        sample = Sample(
            index=self._index,
            text=text,
            output_ids=ids,
            output_logprobs=_logprobs(
                (meta.get("output_token_logprobs") or [])[-new_count:] if new_count else [],
                (meta.get("output_top_logprobs") or [])[-new_count:] if new_count else [],
            ),
            completion_tokens=max(count, self._tokens),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            retractions=int(meta.get("num_retractions") or 0),
        )
        self._tokens = max(count, self._tokens)
        self._keep(meta, new_count)
        finish = meta.get("finish_reason")
        if finish is not None:
            self._over = True
            if self._meta is not None:
                sample.engine_meta.update(self._meta)
            sample.finish_reason.CopyFrom(_finish(finish))
            self._stamps.spans(sample, meta.get("weight_versions") or (), self._since)
            self._stamps.kv_of(sample, self._since)
            for span in sample.versions:
                span.adapter_version = self._adapter_version
        return sample

    def _keep(self, meta: dict[str, Any], new: int) -> None:
        """Collect meta information as without a stream: lists grow, and the facts of the prompt stay."""
        if self._meta is None:
            return
        for name, value in meta.items():
            if name.startswith("output_") and isinstance(value, list):
                self._meta.setdefault(name, []).extend(value[-new:] if new else ())
            elif value or not self._meta.get(name):
                self._meta[name] = value


def _head(response: GenerateResponse, event: dict[str, Any], request: GenerateRequest) -> None:
    """Add the facts of the prompt to the first response."""
    meta = event["meta_info"]
    response.prompt_tokens = int(meta.get("prompt_tokens") or 0)
    text = request.WhichOneof("prompt") == "text"
    ids = list(event.get("prompt_token_ids") or ()) if text else list(request.input_ids.ids)
    if text:
        response.prompt_ids.extend(ids)
    if request.HasField("logprob_start_len") and request.logprob_start_len >= 0:
        entries = _logprobs(meta.get("input_token_logprobs") or [], meta.get("input_top_logprobs") or [])
        for entry, token_id in zip(entries, ids[request.logprob_start_len :], strict=False):
            entry.token_id = token_id  # SGLang gives the last id of the vocabulary as 0
        response.input_logprobs.extend(entries)


def _logprobs(tokens: Sequence[Any], tops: Sequence[Any]) -> list[TokenLogprob]:
    """Convert SGLang's [logprob, token id, text] entries. ``tops``: lists of such entries, if requested."""
    entries = []
    for position, (logprob, token_id, *_) in enumerate(tokens):
        entry = TokenLogprob(token_id=token_id, logprob=logprob)
        top = tops[position] if position < len(tops) else None
        entry.top.extend(TokenLogprob(token_id=token, logprob=value) for value, token, *_ in top or ())
        entries.append(entry)
    return entries


def _finish(finish: dict[str, Any]) -> FinishReason:
    if finish.get("type") not in _FINISH:
        raise Reason.ENGINE_FAILED.error(f"SGLang ended the sample for a reason that is not known: {finish}")
    status, message = finish.get("status_code"), str(finish.get("message") or "")
    if finish["type"] == "abort" and status and _ABORTED not in message:
        if _HANDOVER in message:
            raise Reason.HANDOVER_FAILED.error(f"SGLang: {message}")
        raise _refused(message, int(status))
    reason = FinishReason(type=_FINISH[finish["type"]])
    matched = finish.get("matched")
    if isinstance(matched, int):
        reason.matched_token = matched
    elif isinstance(matched, str):
        reason.matched_string = matched
    if finish["type"] == "abort":
        reason.message = message
    return reason


def _typed(error: RlctlError) -> RlctlError:
    """Return the caller's error for a failed stream."""
    status = int(error.metadata.get("status", "0"))
    if status:
        return _refused(error.message, status)
    return Reason.STAGE_NOT_SERVING.error(error.message)


def _refused(message: str, status: int) -> RlctlError:
    return refused("SGLang", message, status, ("longer than", "exceeds the maximum"))
