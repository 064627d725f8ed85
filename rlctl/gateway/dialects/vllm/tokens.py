"""vLLM's /inference/v1/generate: token ids in and out, complete or streamed.

Fields and replies of vLLM 0.32.0 (``vllm/entrypoints/scale_out/token_in_token_out``), in both output modes. Log
probabilities are the fleet's: after temperature.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.enums import short_name
from rlctl.contract.errors import Reason
from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.gateway.generation import logprobs, sessions
from rlctl.gateway.generation import samples as running
from rlctl.gateway.generation.openai import LONGEST, SAMPLING, spans, usage
from rlctl.gateway.generation.sglang import DONE, event, failed
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Reply, Stream
from rlctl.rollout import continuation
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime.http_forwarding import min_version
from rlctl.sglang_api.request import assign
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FinishType, GenerateRequest, Sample, TokenIds, TokenLogprob

MODES = ("tokens", "text")

_SAMPLING = {**SAMPLING, "include_stop_str_in_output": "no_stop_trim"}

_WITHOUT: dict[str, tuple[Any, ...]] = {
    "structured_outputs": (),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprob_token_ids": (),
}
"""Sampling parameters that are refused instead of ignored, and their values without effect."""

_BESIDE = dict.fromkeys(("features", "content_parts", "kv_transfer_params", "ec_transfer_params"), ())
"""Fields that are refused, too."""


@dataclass(frozen=True)
class _ReplyOptions:
    """A call.

    Attributes:
        model: the caller's name of the model.
        n: number of samples.
        text: return text, of the output and of single tokens.
        tokenizer: tokenizer for the text of single tokens.
        tops: most likely tokens at each output position; None for no log probabilities.
        prompt_tops: the same for the prompt.
        ids: return the prompt's token ids.
        usage: end a stream with token counts.
        running_usage: also add token counts to each event.
        stops: token ids that end a sample.
    """

    rid: str
    model: str
    n: int
    text: bool
    tokenizer: Tokenizer | None
    tops: int | None
    prompt_tops: int | None
    ids: bool
    usage: bool
    running_usage: bool
    stops: frozenset[int]

    @property
    def mode(self) -> str:
        return MODES[self.text]


async def generate(call: Call) -> Answer:
    """Generate from token ids; vLLM's fields and reply."""
    fields = await call.fields()
    name = fields.take("model", str, "")
    model, adapter = await call.generation.named(name)
    request = GenerateRequest(model=model, adapter=adapter, min_version_seq=min_version(call.headers))
    request.input_ids.CopyFrom(await call.beside(lambda: _token_ids(fields)))
    stream = fields.take("stream", bool, False)
    reply_options = await _read(call, fields, request, name, stream=stream)
    size = request.ByteSize()
    call.generation.check_bytes(size, reply_options.n * size)
    session = sessions.named(call, {name: fields.take(name, object, None) for name in sessions.FIELDS})

    def make() -> list[RolloutSample]:
        samples = []
        for index in range(reply_options.n):
            sample = continuation.begin(request, index=index, session_id=session)
            sample.request.rid = reply_options.rid if reply_options.n == 1 else f"{reply_options.rid}-{index}"
            if index:
                sample.request.ClearField("logprob_start_len")  # only sample 0 returns prompt log probabilities
            samples.append(sample)
        return samples

    samples = await call.beside(make)
    call.forget()
    if stream:
        return Stream(_events(call, reply_options, samples), failed)
    ended = await running.whole(call, samples)
    output_tokens = sum(len(sample.output_ids) for sample in ended)
    reply = {
        "request_id": reply_options.rid,
        "created": int(time.time()),
        "model": reply_options.model or model,
        "output_mode": reply_options.mode,
        "choices": [_choice(reply_options, index, sample.whole, sample) for index, sample in enumerate(ended)],
        "prompt_logprobs": (
            None
            if reply_options.prompt_tops is None
            else logprobs.of_prompt(ended[0].input_logprobs, reply_options.prompt_tops)
        ),
        "prompt_token_ids": list(ended[0].prompt_ids) if reply_options.ids else None,
        "usage": usage(len(ended[0].prompt_ids), output_tokens),
    }
    return Reply(reply)


def _token_ids(fields: Fields) -> TokenIds:
    value = fields.take("token_ids", object)
    if isinstance(value, TokenIds):
        return value
    try:
        return TokenIds(ids=fields.take_list("token_ids", int))
    except ValueError as error:
        raise Reason.FIELD_INVALID.error(str(error), field="token_ids") from None


async def _read(call: Call, fields: Fields, request: GenerateRequest, name: str, *, stream: bool) -> _ReplyOptions:
    fields.refuse(_BESIDE)
    fields.accept("token_offsets", "reasoning_ended", "reasoning_parser_kwargs", "priority")
    mode = fields.take("output_mode", str, MODES[0])
    if mode not in MODES:
        raise Reason.FIELD_INVALID.error(f"{mode!r} must be one of {', '.join(MODES)}", field="output_mode")
    options = call.watch(fields.take_fields("stream_options", {}))
    with_usage = options.take("include_usage", bool, False)
    sampling = call.watch(fields.take_fields("sampling_params", {}))
    tops, prompt_tops = sampling.take("logprobs", int, None), None
    if not stream:  # not supported by streams
        prompt_tops = sampling.take("prompt_logprobs", int, None)
    for field, value in (("logprobs", tops), ("prompt_logprobs", prompt_tops)):
        if value is not None:
            request.return_logprob = True
            number = max(request.top_logprobs_num, value) if value >= 0 else value
            assign(request, "top_logprobs_num", number, f"sampling_params.{field}")
    if prompt_tops is not None:
        request.logprob_start_len = 0
    n = _sampling(request, sampling)
    call.generation.check_samples([n], "sampling_params.n", "token_ids")
    return _ReplyOptions(
        rid=fields.take("request_id", str, "") or uuid.uuid4().hex,
        model=name,
        n=n,
        text=mode == "text",
        tokenizer=await call.generation.tokenizers.maybe(request.model) if mode == "text" else None,
        tops=tops,
        prompt_tops=prompt_tops,
        ids=fields.take("return_token_ids", bool, False),
        usage=with_usage,
        running_usage=options.take("continuous_usage_stats", bool, False) and with_usage,
        stops=frozenset(request.sampling_params.stop_token_ids),
    )


def _sampling(request: GenerateRequest, sampling: Fields) -> int:
    """Set the sampling parameters. Return the number of samples."""
    sampling.refuse(_WITHOUT)
    params = request.sampling_params
    for name, parameter in _SAMPLING.items():
        value = sampling.take(name, object, None)
        if value is not None:
            assign(params, parameter, value, f"sampling_params.{name}")
    assign(params, "max_new_tokens", sampling.take("max_tokens", int, LONGEST), "sampling_params.max_tokens")
    top_k = sampling.take("top_k", int, None)
    if top_k is not None:
        assign(params, "top_k", top_k or -1, "sampling_params.top_k")
    stop = sampling.take("stop", str | list, None)
    if stop is not None:
        assign(params, "stop", [stop] if isinstance(stop, str) else stop, "sampling_params.stop")
    n = sampling.take("n", int, 1)
    sampling.accept("detokenize", "output_kind", "flat_logprobs", "extra_args")
    return n


def sampling_of_chat(fields: Fields) -> dict[str, Any]:
    """Return a chat's sampling parameters under the names of this route."""
    sampling = {name: fields.take(name, object, None) for name in (*_SAMPLING, "top_k", "stop", "n")}
    sampling["max_tokens"] = fields.take("max_completion_tokens", object, fields.take("max_tokens", object, None))
    if fields.take("logprobs", bool, False):
        sampling["logprobs"] = fields.take("top_logprobs", int, 0)
    return {name: value for name, value in sampling.items() if value is not None}


async def _events(call: Call, reply_options: _ReplyOptions, samples: Sequence[RolloutSample]) -> AsyncIterator[bytes]:
    head: dict[str, Any] = {"request_id": reply_options.rid, "output_mode": reply_options.mode, "usage": None}
    prompt, output_counts = list(samples[0].request.input_ids.ids), [0] * len(samples)
    first = {"prompt_token_ids": prompt} if reply_options.ids else {}
    news = running.streamed(call, samples)
    try:
        async for new in news:
            part = new.part
            output_counts[new.index] += len(part.output_ids)
            if reply_options.running_usage:
                head["usage"] = usage(len(prompt), output_counts[new.index])
            yield event({**head, **first, "choices": [_choice(reply_options, new.index, part, new.ended)]})
            first = {}
        if reply_options.usage:
            yield event({**head, "choices": [], "usage": usage(len(prompt), sum(output_counts))})
        yield DONE
    finally:
        await news.aclose()


def _choice(reply_options: _ReplyOptions, index: int, part: Sample, ended: RolloutSample | None) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "token_ids": list(part.output_ids),
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "weight_versions": None,
    }
    if reply_options.text:
        choice["text"] = part.text
    if reply_options.tops is not None:
        choice["logprobs"] = {"content": [_position(reply_options, entry) for entry in part.output_logprobs]}
    if ended is not None:
        reason = ended.whole.finish_reason
        choice["finish_reason"] = short_name(FinishType.DESCRIPTOR, reason.type or FINISH_TYPE_ABORT)
        matched = reason.WhichOneof("matched")
        stop = getattr(reason, matched) if matched else None
        # The end-of-text token is no stop that the caller requested.
        choice["stop_reason"] = stop if isinstance(stop, str) or stop in reply_options.stops else None
        choice["weight_versions"] = spans(ended)
    return choice


def _position(reply_options: _ReplyOptions, entry: TokenLogprob) -> dict[str, Any]:
    """Return an output position. The token itself is also first among the most likely tokens."""
    tops = reply_options.tops or 0
    tokens = [_token(reply_options, each, rank) for each, rank in logprobs.ranked(entry, tops)[: max(tops, 1)]]
    return {**tokens[0], "top_logprobs": tokens}


def _token(reply_options: _ReplyOptions, entry: TokenLogprob, rank: int) -> dict[str, Any]:
    token, logprob = entry.token_id, logprobs.finite(entry.logprob)
    if not reply_options.text:
        return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": rank}
    if reply_options.tokenizer is None:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
    text = reply_options.tokenizer.text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
