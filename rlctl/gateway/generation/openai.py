"""POST /v1/completions and /v1/chat/completions: fields and replies of OpenAI, and further fields of engines.

Source: OpenAI's API reference (Completions, Chat). Unsupported fields are refused by name, not ignored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import check_levels, seed_of
from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.gateway.generation import logprobs, sessions
from rlctl.gateway.generation import samples as running
from rlctl.gateway.generation.sglang import DONE, Teller, event, failed
from rlctl.gateway.http import bodies
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Reply, Stream
from rlctl.rollout import continuation
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime.http_forwarding import min_version
from rlctl.sglang_api.request import PromptRequest, assign
from rlctl.v1.rollout_pb2 import GenerateRequest, Sample, TokenIds

COMPLETION_TOKENS = 16
"""OpenAI's default for completions. A chat has no default limit."""

LONGEST = 1 << 24
MOST_LOGPROBS = 20

SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "min_tokens": "min_new_tokens",
}
"""Sampling parameters of OpenAI and vLLM, with their names in the contract."""

_SAMPLING = {**SAMPLING, "top_k": "top_k", "no_stop_trim": "no_stop_trim"}
_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    # Fields of vLLM and SGLang.
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Unsupported fields, and their values without effect."""

_RENDERED = (
    "messages",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tool_choice",
)
"""Fields of a chat that its token ids already contain."""

_ENGINE = ("regex", "ebnf", "stop_regex", "structural_tag", "custom_params")
"""SGLang's sampling parameters that SGLang's OpenAI routes accept, too."""

_STRUCTURED = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "structural_tag": "structural_tag"}
"""Keys of vLLM's ``structured_outputs``, with their names in SGLang."""

_NOTHING = ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True)
class _ReplyOptions:
    """A call.

    Attributes:
        model: the caller's name of the model.
        n: samples of each prompt.
        ids: return token ids; vLLM's ``return_token_ids``.
        prompt_tops: most likely tokens at each position of the prompt, or None; vLLM's ``prompt_logprobs``.
        texts: tokenizer for the text of single tokens, if log probabilities are requested.
        meta: choices have SGLang's ``meta_info``.
        began: time of the call on the performance counter.
    """

    chat: bool
    rid: str
    model: str
    n: int
    logprobs: bool
    usage: bool
    ids: bool
    prompt_tops: int | None
    texts: Tokenizer | None
    created: int
    meta: bool = False
    began: float = 0.0


async def completions(call: Call) -> Answer:
    """Complete texts; OpenAI's fields and reply."""
    fields = await call.fields()
    name = fields.take("model", str, "")
    model, adapter = await call.generation.named(name)
    tops = fields.take("logprobs", int, None)

    def read() -> list[GenerateRequest]:
        requests: list[GenerateRequest] = []
        total_bytes = 0
        for prompt in _prompts(fields.take("prompt", str | list | TokenIds), call.generation.check_count):
            fields.refuse({"tools": ([],)})
            request = _request(call, fields, model, adapter, wanted=tops is not None, tops=tops or 0)
            limit = fields.take("max_tokens", int, COMPLETION_TOKENS)
            assign(request.sampling_params, "max_new_tokens", limit, "max_tokens")
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.input_ids.CopyFrom(prompt)
            requests.append(request)
            size = request.ByteSize()
            total_bytes += size
            call.generation.check_bytes(size, total_bytes)
        return requests

    requests = await call.beside(read)
    return await _answer(call, fields, requests, name or model, chat=False, with_logprobs=tops is not None)


async def chat(call: Call) -> Answer:
    """Continue a conversation, by the chat template of the model's tokenizer; OpenAI's fields and reply."""
    fields = await call.fields()
    name = fields.take("model", str, "")
    model, adapter = await call.generation.named(name)
    with_logprobs = fields.take("logprobs", bool, False)
    tops = fields.take("top_logprobs", int, 0)
    if tops and not with_logprobs:
        raise Reason.FIELD_CONFLICT.error("top_logprobs needs logprobs", field="top_logprobs")
    request = _request(call, fields, model, adapter, wanted=with_logprobs, tops=tops)
    limit = fields.take("max_completion_tokens", int, fields.take("max_tokens", int, LONGEST))
    assign(request.sampling_params, "max_new_tokens", limit, "max_tokens")
    input_ids = fields.take_list("input_ids", int, None)
    if input_ids is None:
        request.input_ids.CopyFrom(TokenIds(ids=await render(call, fields, model)))
    else:  # SGLang's: the caller has rendered the messages
        _tools(fields)
        fields.accept(*_RENDERED)
        assign(request.input_ids, "ids", input_ids, "input_ids")
    return await _answer(call, fields, [request], name or model, chat=True, with_logprobs=with_logprobs)


async def render(call: Call, fields: Fields, model: str) -> list[int]:
    """Return the token ids of ``messages``, by the chat template of the model's tokenizer.

    Raises FIELD_REQUIRED, FIELD_INVALID, UNSUPPORTED, and as :meth:`Tokenizers.of`.
    """
    messages = [_message(each, f"messages[{i}]") for i, each in enumerate(fields.take_list("messages", dict))]
    if not messages:
        raise Reason.FIELD_REQUIRED.error("messages is empty", field="messages")
    settings = dict(fields.take("chat_template_kwargs", dict, {}))
    for name in ("add_generation_prompt", "continue_final_message"):
        value = fields.take(name, bool, None)
        if value is not None:
            settings[name] = value
    tools = _tools(fields)
    if tools:
        settings["tools"] = tools
    tokenizer = await call.generation.tokenizers.of(model)
    return await tokenizer.chat(messages, settings, call.size)


def _tools(fields: Fields) -> Sequence[dict[str, Any]]:
    """Return the tools for the template. Raises UNSUPPORTED for tools whose calls need parsing of the text."""
    tools: Sequence[dict[str, Any]] = fields.take_list("tools", dict, ())
    if tools and fields.take("tool_choice", object, "auto") != "none":
        raise Reason.UNSUPPORTED.error(
            "tool calls are not parsed",
            field="tools",
            next_step='With tool_choice "none" the tools are rendered into the prompt, and the text is not parsed.',
        )
    return tools


async def _answer(
    call: Call, fields: Fields, requests: Sequence[GenerateRequest], name: str, *, chat: bool, with_logprobs: bool
) -> Answer:
    n = fields.take("n", int, 1)
    call.generation.check_samples([n] * len(requests), "n", "prompt")
    sizes = [request.ByteSize() for request in requests]
    call.generation.check_bytes(max(sizes), n * sum(sizes))
    if fields.take("best_of", int, n) != n:
        raise Reason.UNSUPPORTED.error("best_of must equal n: every generated sample is returned", field="best_of")
    rid = fields.take("rid", str, "") or f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
    session = sessions.named(call, {name: fields.take(name, object, None) for name in sessions.FIELDS})

    def make() -> list[RolloutSample]:
        samples = []
        for number, request in enumerate(requests):
            for index in range(n):
                sample = continuation.begin(request, prompt=number, index=index, session_id=session)
                sample.request.rid = rid if len(requests) * n == 1 else f"{rid}_{number * n + index}"
                if (seed := seed_of(request.sampling_params, index)) is not None:
                    sample.request.sampling_params.seed = seed
                samples.append(sample)
        return samples

    samples = await call.beside(make)
    stream = fields.take("stream", bool, False)
    options = fields.take_fields("stream_options", {})
    fields.accept(*_NOTHING)
    by_id = fields.take("return_tokens_as_token_ids", bool, False)
    with_texts = with_logprobs and not by_id
    reply_options = _ReplyOptions(
        chat=chat,
        rid=rid,
        model=name,
        n=n,
        logprobs=with_logprobs,
        usage=options.take("include_usage", bool, False),
        ids=fields.take("return_token_ids", bool, False),
        prompt_tops=fields.take("prompt_logprobs", int, None),
        texts=await call.generation.tokenizers.maybe(requests[0].model) if with_texts else None,
        created=int(time.time()),
        meta=chat and fields.take("return_meta_info", bool, False),
        began=time.perf_counter(),
    )
    call.forget()
    if stream:
        if reply_options.prompt_tops is not None:
            raise Reason.FIELD_CONFLICT.error("prompt_logprobs and stream exclude each other", field="prompt_logprobs")
        if reply_options.meta:
            raise Reason.FIELD_CONFLICT.error(
                "return_meta_info and stream exclude each other", field="return_meta_info"
            )
        return Stream(_events(call, reply_options, samples), failed)
    ended = await running.whole(call, samples)
    reply: dict[str, Any] = {
        **_head(reply_options, ended, chunk=False),
        "choices": [_choice(reply_options, index, sample.whole, sample) for index, sample in enumerate(ended)],
        "usage": _usage(ended),
        **_metadata(ended[0]),
    }
    return Reply({**reply, **_of_prompt(reply_options, ended[0])} if chat else reply)


def _request(call: Call, fields: Fields, model: str, adapter: str, *, wanted: bool, tops: int) -> GenerateRequest:
    fields.refuse(_WITHOUT)
    request = GenerateRequest(model=model, return_logprob=wanted, min_version_seq=min_version(call.headers))
    if not 0 <= tops <= MOST_LOGPROBS:
        raise Reason.FIELD_INVALID.error(f"{tops} is not from 0 to {MOST_LOGPROBS}", field="logprobs")
    request.top_logprobs_num = tops
    prompt_tops = fields.take("prompt_logprobs", int, None)
    if prompt_tops is not None:
        request.return_logprob, request.logprob_start_len = True, 0
        assign(request, "top_logprobs_num", max(prompt_tops, tops) if prompt_tops >= 0 else prompt_tops,
               "prompt_logprobs")  # fmt: skip
    request.adapter = fields.take("lora_path", str, "") or adapter
    if adapter not in ("", request.adapter):
        raise Reason.FIELD_CONFLICT.error(f"model means adapter {adapter}", field="lora_path")
    for name, parameter in _SAMPLING.items():
        value = fields.take(name, object, None)
        if name == "top_k" and value == 0:  # vLLM's value for no limit, refused by SGLang
            value = -1
        if value is not None:
            assign(request.sampling_params, parameter, value, name)
    stop = fields.take("stop", str | list, None)
    if stop is not None:
        assign(request.sampling_params, "stop", [stop] if isinstance(stop, str) else stop, "stop")
    engine = _engine_fields(fields)
    check_levels(engine, "", within=2)
    if engine:
        request.engine_fields.update({"sampling_params": engine})
    return request


def _engine_fields(fields: Fields) -> dict[str, Any]:
    """Return the fields that only some engines support. Other engines refuse these fields."""
    values = {name: fields.take(name, object, None) for name in _ENGINE}
    engine = {name: value for name, value in values.items() if value is not None}
    bias = fields.take("logit_bias", dict, None)
    if bias:
        engine["logit_bias"] = bias
    for name, value in (fields.take("structured_outputs", dict, None) or {}).items():
        if value is None:
            continue
        field = f"structured_outputs.{name}"
        if name not in _STRUCTURED:
            raise Reason.UNSUPPORTED.error(f"{name} is not supported; use one of {', '.join(_STRUCTURED)}", field=field)
        engine[_STRUCTURED[name]] = value if isinstance(value, str) else bodies.dump(value, field).decode()
    form = fields.take_fields("response_format", {})
    kind = form.take("type", str, "text")
    if kind == "json_object":
        engine["json_schema"] = '{"type": "object"}'
    elif kind == "json_schema":
        schema = form.take_fields("json_schema").take("schema", dict)
        engine["json_schema"] = bodies.dump(schema, "response_format.json_schema.schema").decode()
    elif kind != "text":
        raise Reason.UNSUPPORTED.error(f"response_format.type {kind!r} is not supported", field="response_format.type")
    return engine


def _prompts(value: str | list[Any] | TokenIds, check: Callable[[int, str], None]) -> list[str | TokenIds]:
    """Return the prompts, texts or token ids; a single prompt is a batch. ``check`` may refuse their number."""
    if isinstance(value, str | TokenIds) or (value and all(isinstance(each, int) for each in value)):
        value = [value]
    if not value:
        raise Reason.FIELD_REQUIRED.error("prompt is empty", field="prompt")
    check(len(value), "prompt")
    prompts: list[str | TokenIds] = []
    for each in value:
        if isinstance(each, str | TokenIds):
            prompts.append(each)
            continue
        ids = TokenIds()
        if not isinstance(each, list):
            raise Reason.FIELD_INVALID.error(
                "prompt must be a text, a list of token ids, or a list of these", field="prompt"
            )
        assign(ids, "ids", each, "prompt")
        prompts.append(ids)
    return prompts


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message for the template. Text parts are joined; other parts are refused."""
    if not isinstance(message.get("role"), str):
        raise Reason.FIELD_REQUIRED.error(f"{where}.role is required", field=f"{where}.role")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Reason.UNSUPPORTED.error("only parts of text are taken", field=f"{where}.content")
        return {**message, "content": "".join(part["text"] for part in content)}
    if content is not None and not isinstance(content, str):
        raise Reason.FIELD_INVALID.error(f"{where}.content must be a text", field=f"{where}.content")
    return message


async def _events(call: Call, reply_options: _ReplyOptions, samples: Sequence[RolloutSample]) -> AsyncIterator[bytes]:
    head = _head(reply_options, (), chunk=True)
    ended: list[RolloutSample] = []
    characters = [0] * len(samples)  # of the tokens with log probabilities sent
    pending_choices = range(len(samples) if reply_options.chat else 0)
    news = running.streamed(call, samples)
    try:
        async for new in news:
            for index in pending_choices:  # not earlier: a refused request gets an error response
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event({**head, **_of_prompt(reply_options, samples[index]), "choices": [first]})
            pending_choices = range(0)
            if new.ended is not None:
                ended.append(new.ended)
            choice = _choice(reply_options, new.index, new.part, new.ended, chunk=True, at=characters[new.index])
            characters[new.index] += sum(len(token) for token in (choice["logprobs"] or {}).get("tokens", ()))
            yield event({**head, "choices": [choice]})
        if reply_options.usage:
            yield event({**head, "choices": [], "usage": _usage(ended)})
        yield DONE
    finally:
        await news.aclose()


def _head(reply_options: _ReplyOptions, ended: Sequence[RolloutSample], *, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if reply_options.chat else "text_completion"
    head: dict[str, Any] = {
        "id": reply_options.rid,
        "object": kind,
        "created": reply_options.created,
        "model": reply_options.model,
    }
    sequences = [span.version.sequence for sample in ended for span in sample.whole.versions]
    sequences = sequences or [sample.answered_at.sequence for sample in ended if sample.answered_at is not None]
    if sequences:
        head["weight_version_seq"] = min(sequences)
    return head


def _choice(
    reply_options: _ReplyOptions,
    index: int,
    part: Sample,
    ended: RolloutSample | None,
    *,
    chunk: bool = False,
    at: int = 0,
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": ended.finish if ended else None}
    if not reply_options.chat:
        choice["text"] = part.text
    elif chunk:
        choice["delta"] = {"content": part.text}
    else:
        choice["message"] = {"role": "assistant", "content": part.text}
    if reply_options.logprobs and reply_options.chat:
        choice["logprobs"] = logprobs.chat(part.output_logprobs, reply_options.texts)
    elif reply_options.logprobs:
        choice["logprobs"] = logprobs.completion(part.output_logprobs, reply_options.texts, at)
    if reply_options.ids:
        choice["token_ids"] = list(part.output_ids)
    if ended is not None and not reply_options.chat:
        choice |= _of_prompt(reply_options, ended)
    if ended is not None and reply_options.meta:
        request = PromptRequest(ended.request.rid, ended.request)
        choice["meta_info"] = Teller(request.rid, request, reply_options.began).all_of(ended)["meta_info"]
    return choice


def _of_prompt(reply_options: _ReplyOptions, sample: RolloutSample) -> dict[str, Any]:
    """Return vLLM's prompt data: in each choice of a completion, beside the choices of a chat."""
    prompt_data: dict[str, Any] = {}
    if reply_options.ids:
        prompt_data["prompt_token_ids"] = list(sample.prompt_ids)
    if reply_options.prompt_tops is not None:
        prompt_data["prompt_logprobs"] = logprobs.of_prompt(sample.input_logprobs, reply_options.prompt_tops)
    return prompt_data


def _metadata(sample: RolloutSample) -> dict[str, Any]:
    """Return SGLang's data about the weights of the first choice."""
    version = sample.last_version
    if version is None:
        return {}
    metadata: dict[str, Any] = {"weight_version": version.label}
    if sample.whole.versions:
        metadata["weight_versions"] = spans(sample)
    return {"metadata": metadata}


def spans(sample: RolloutSample) -> list[dict[str, Any]]:
    """Return the ranges of output tokens at one version."""
    return [{"version": span.version.label, "start": span.start, "end": span.end} for span in sample.whole.versions]


def _usage(ended: Sequence[RolloutSample]) -> dict[str, int]:
    prompt = sum(len(sample.prompt_ids) for sample in ended if sample.index == 0)
    return usage(prompt, sum(len(sample.whole.output_ids) for sample in ended))


def usage(prompt: int, output: int) -> dict[str, int]:
    """Return numbers of tokens in OpenAI's form."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
