"""Generation with vLLM's token ids in and out, /inference/v1/generate: a request of vLLM for each sample."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.requests import limits as requests
from rlctl_servers.requests.cache_salts import salt_of, with_own
from rlctl_servers.requests.limits import logprob_start, refuse_prompt
from rlctl_servers.requests.requests import ABORT_CALL_S
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps

from rlctl.contract.errors import Reason, RlctlError
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
from rlctl_vllm.requests.bodies import MOST_SALT, SALT, Limits, bodies, scores_only

GENERATE = "/inference/v1/generate"
TOKENIZE_S = 10.0
LONGEST_S = 86400.0
"""Seconds that an unstreamed answer may take. The caller ends such a request by disconnecting."""

_BEFORE_ID = "generate-tokens-"
"""Prefix that vLLM puts before the id of a request to :data:`GENERATE`."""

_TOKEN = "token_id:"
_OWN = ("finish_reason", "stop_reason", "weight_versions")
"""vLLM's fields at the end of a sample, beside the sample."""

_FINISH = {"length": FINISH_TYPE_LENGTH, "stop": FINISH_TYPE_STOP, "abort": FINISH_TYPE_ABORT}


class TokensInOut:
    """vLLM's /inference/v1/generate and /abort_requests, as :class:`rlctl_servers.requests.requests.Dialect`."""

    product = "vLLM"

    def __init__(self, http: Http, limits: Limits, stamps: Stamps, adapters: LoraTable) -> None:
        self.adapters = adapters
        self.http = http
        self.stamps = stamps
        self._limits = limits

    def new_rid(self) -> str:
        """Return an id that was never used."""
        return _BEFORE_ID + uuid.uuid4().hex

    async def begin(self, request: GenerateRequest, engine_rids: Sequence[str]) -> Sequence[_Reading]:
        """Return a request's samples. Raises ADAPTER_NOT_FOUND, and as :func:`rlctl_vllm.requests.bodies.bodies`."""
        if request.adapter:
            self.adapters.find(request.adapter, "adapter")
        refuse_prompt(request, self._limits)
        ids: Sequence[int] = request.input_ids.ids
        if request.WhichOneof("prompt") == "text":
            ids = await tokenize(self.http, request.text)
        sample_bodies = bodies(request, ids, [rid.removeprefix(_BEFORE_ID) for rid in engine_rids], self._limits)
        return [_Reading(self, index, request, body) for index, body in enumerate(sample_bodies)]

    def admit(self, request: GenerateRequest) -> None:
        """Let every request start at once: vLLM's servers form no pairs."""

    def admit_passed(self, *, prepared: bool) -> None:
        """Let every request start at once, as :meth:`admit` does."""

    def prepares(self, request: GenerateRequest) -> bool:  # noqa: ARG002
        """Whether a paused vLLM may be stuck with the request: never."""
        return False

    def ends(self, *, heard: bool) -> bool:  # noqa: ARG002 - SGLang's cannot always be
        """Whether vLLM can end a sample: always."""
        return True

    async def end(self, engine_rids: Sequence[str] | None) -> None:
        """End samples early; None: all samples of the server."""
        # An empty list would end all samples.
        if engine_rids is not None and not engine_rids:
            return
        body = {} if engine_rids is None else {"request_ids": list(engine_rids)}
        try:
            answer = await self.http.call("/abort_requests", body, timeout_s=ABORT_CALL_S)
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error("vLLM did not take the abort in time") from None
        if answer.status != 200:
            raise Reason.ENGINE_FAILED.error(f"vLLM refused the abort: {answer.message}")


async def tokenize(http: Http, text: str) -> list[int]:
    """Return a prompt's token ids. Raises DEADLINE_EXCEEDED, STAGE_NOT_SERVING, and vLLM's refusals."""
    if not text:
        return []
    try:
        answer = await http.call("/tokenize", {"prompt": text}, timeout_s=TOKENIZE_S, admin=False, reuse=True)
    except TimeoutError:
        raise Reason.DEADLINE_EXCEEDED.error("vLLM did not tokenize the prompt in time") from None
    except RlctlError as error:
        raise Reason.STAGE_NOT_SERVING.error(error.message) from error
    if not answer.ok:
        raise refused(answer.message, answer.status)
    return [int(token) for token in answer.body["tokens"]]


class _Reading:
    """A sample as it arrives: messages with new output, then a message with the counts."""

    def __init__(self, dialect: TokensInOut, index: int, request: GenerateRequest, body: dict[str, Any]) -> None:
        self._dialect = dialect
        self._since = dialect.stamps.present
        self._index = index
        self._request = request
        self._body = body
        self._head = index == 0
        self._tokens = 0
        self._last = 0
        self._ended: GenerateResponse | None = None
        self._words: dict[str, Any] = {}
        self._adapter_version = ""

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def over(self) -> bool:
        """Whether the end of the sample was reported."""
        return self._ended is not None

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield vLLM's stream of the sample, or the single answer."""
        with self._dialect.adapters.using(self._request.adapter) as adapter:
            if adapter is not None:
                self._body["model"], self._adapter_version = adapter.name, adapter.info.version
            self._since = self._dialect.stamps.present
            salt = salt_of(self._since, adapter.name if adapter is not None else "")
            self._body[SALT] = with_own(salt, self._body.get(SALT), MOST_SALT)
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        http = self._dialect.http
        try:
            if self._body["stream"]:
                async with aclosing(http.stream(GENERATE, self._body)) as stream:
                    async for event in stream:
                        yield event
                return
            answer = await http.call(GENERATE, self._body, timeout_s=LONGEST_S, admin=False, reuse=True)
        except RlctlError as error:
            status = int(error.metadata.get("status", "0"))
            raise (refused(error.message, status) if status else Reason.STAGE_NOT_SERVING.error(error.message)) from (
                error
            )
        if answer.status != 200:
            raise refused(answer.message, answer.status)
        yield answer.body

    def take(self, event: dict[str, Any]) -> GenerateResponse | None:
        """Return the new output. The last tokens of a sample are held back until their counts have come."""
        if "choices" not in event:
            error = event.get("error") or {}
            raise refused(str(error.get("message")), int(error.get("code") or 500))
        response: GenerateResponse | None = None
        if event["choices"]:
            response = GenerateResponse(samples=[self._sample(event["choices"][0])])
            if self._head:
                self._head = False
                self._say_of_prompt(response, event)
            if response.samples[0].HasField("finish_reason"):
                self._ended, response = response, None
                self._words = {name: event["choices"][0].get(name) for name in _OWN}
        if event.get("usage") and self._ended is not None:
            response = self._ended
            details = event["usage"].get("prompt_tokens_details") or {}
            sample = response.samples[0]
            sample.cached_tokens = int(details.get("cached_tokens") or 0)
            self._dialect.stamps.kv_of(sample, self._since)
            if self._request.return_engine_meta:
                sample.engine_meta.update({**self._words, "usage": event["usage"]})
        return response

    def _sample(self, choice: Mapping[str, Any]) -> Sample:
        ids = [int(token) for token in choice.get("token_ids") or ()]
        sample = Sample(index=self._index)
        finish = choice.get("finish_reason")
        if scores_only(self._request):
            finish = finish and ("abort" if finish == "abort" else "length")
        else:
            self._last = ids[-1] if ids else self._last
            self._tokens += len(ids)
            sample.text = choice.get("text") or ""
            sample.output_ids.extend(ids)
            sample.output_logprobs.extend(self._logprobs(ids, choice.get("logprobs")))
        sample.completion_tokens = self._tokens
        if finish is not None:
            sample.finish_reason.CopyFrom(self._finish(str(finish), choice.get("stop_reason")))
            self._dialect.stamps.spans(sample, choice.get("weight_versions") or (), self._since)
            for span in sample.versions:
                span.adapter_version = self._adapter_version
        return sample

    def _logprobs(self, ids: Sequence[int], logprobs: Mapping[str, Any] | None) -> list[TokenLogprob]:
        if not logprobs or not (self._request.return_logprob or self._request.top_logprobs_num):
            return []
        entries = []
        for token_id, entry in zip(ids, logprobs["content"], strict=True):
            logprob = TokenLogprob(token_id=token_id, logprob=entry["logprob"])
            if self._request.top_logprobs_num:
                tops = [(id_of(top), float(top["logprob"])) for top in entry.get("top_logprobs") or ()]
                logprob.top.extend(_entries(tops, self._request.top_logprobs_num))
            entries.append(logprob)
        return entries

    def _say_of_prompt(self, response: GenerateResponse, event: Mapping[str, Any]) -> None:
        ids = self._body["token_ids"]
        response.prompt_tokens = len(ids)
        if self._request.WhichOneof("prompt") == "text":
            response.prompt_ids.extend(ids)
        start = logprob_start(self._request)
        if start < 0:
            return
        for token_id, entry in list(zip(ids, event.get("prompt_logprobs") or (), strict=False))[start:]:
            logprob = response.input_logprobs.add(token_id=token_id)
            if entry is None:  # nothing precedes the first token
                continue
            logprob.logprob = entry[str(token_id)]["logprob"]
            tops = [(int(top), float(value["logprob"])) for top, value in entry.items()]
            logprob.top.extend(_entries(tops, self._request.top_logprobs_num))

    def _finish(self, kind: str, stop: int | str | None) -> FinishReason:
        if kind not in _FINISH:
            raise Reason.ENGINE_FAILED.error(f"vLLM ended the sample for a reason that is not known: {kind}")
        reason = FinishReason(type=_FINISH[kind])
        if kind == "abort":
            reason.message = "aborted"
        elif kind == "stop" and isinstance(stop, str):
            reason.matched_string = stop
        elif kind == "stop":
            # vLLM does not name an end-of-sequence token, which is the last token.
            reason.matched_token = self._last if stop is None else int(stop)
        return reason


def id_of(top: Mapping[str, Any]) -> int:
    """Return the token id of an entry of the most likely tokens. Raises UNSUPPORTED."""
    if "token_id" in top:
        return int(top["token_id"])
    return id_in(str(top["token"]))


def id_in(token: str) -> int:
    """Return the id in "token_id:5". Raises UNSUPPORTED for a token's text."""
    if not token.startswith(_TOKEN):
        raise Reason.UNSUPPORTED.error(
            "this vLLM returns tokens as texts, not as token ids",
            field="top_logprobs_num",
            next_step="Start it with --return-tokens-as-token-ids.",
        )
    return int(token[len(_TOKEN) :])


def most_likely(tops: Iterable[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Return the first ``count`` entries by probability: vLLM also returns the sampled token, likely or not."""
    return sorted(tops, key=lambda top: -top[1])[:count]


def _entries(tops: Iterable[tuple[int, float]], count: int) -> list[TokenLogprob]:
    return [TokenLogprob(token_id=token, logprob=value) for token, value in most_likely(tops, count)]


def refused(message: str, status: int) -> RlctlError:
    """Return the error for a request that vLLM has refused."""
    return requests.refused("vLLM", message, status, ("longer than", "maximum context length"))
