"""vLLM's routes that generate from token ids, and those around them: /inference/v1/generate, tokenizers, sessions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from rlctl.client.enums import short_name
from rlctl.errors import Reason
from rlctl.gateway.bodies import Fields
from rlctl.gateway.call import Call
from rlctl.gateway.dialect import Reply, Route, Scope
from rlctl.gateway.generation import logprobs, running, sessions
from rlctl.rollout import progress
from rlctl.rollout.sample import RolloutSample
from rlctl.sglang_api.asking import assign
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FinishType, GenerateRequest, TokenIds

MAX_TOKENS = 16
"""vLLM's default."""

_SAMPLING = {
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
}

_WITHOUT: dict[str, tuple[Any, ...]] = {
    "structured_outputs": (),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
}
"""What is refused rather than ignored, and the values that ask for nothing."""


async def generate(call: Call) -> Reply:
    """Generate from token ids; vLLM's fields and reply."""
    fields = await call.fields()
    if fields.take("stream", bool, False):
        raise Reason.UNSUPPORTED.error("it is answered as a whole", field="stream")
    fields.accept("priority", "kv_transfer_params", "features")
    request = GenerateRequest(model=await call.generation.model(fields.take("model", str, "")))
    request.min_version_seq = sessions.min_version(call)
    try:
        request.input_ids.CopyFrom(TokenIds(ids=fields.take_list("token_ids", int)))
    except ValueError as error:
        raise Reason.FIELD_INVALID.error(str(error), field="token_ids") from None
    n = _sampling(request, call.watch(fields.take_fields("sampling_params", {})))
    rid = fields.take("request_id", str, "") or uuid.uuid4().hex
    session = sessions.named(call, {name: fields.take(name, object, None) for name in sessions.FIELDS})
    samples = []
    for index in range(n):
        sample = progress.begin(request, index=index, session_id=session)
        sample.request.rid = rid if n == 1 else f"{rid}-{index}"
        samples.append(sample)
    ended = await running.whole(call, samples)
    return Reply(
        {
            "request_id": rid,
            "choices": [_choice(index, sample) for index, sample in enumerate(ended)],
            "prompt_logprobs": None,
            "usage": _usage(ended),
        }
    )


def _sampling(request: GenerateRequest, given: Fields) -> int:
    """Fill in the sampling parameters; returns how many samples are wanted."""
    for name, nothing in _WITHOUT.items():
        value = given.take(name, object, None)
        if value is not None and value not in nothing:
            raise Reason.UNSUPPORTED.error("nobody here can do it", field=f"sampling_params.{name}")
    params = request.sampling_params
    for name, ours in _SAMPLING.items():
        value = given.take(name, object, None)
        if value is not None:
            assign(params, ours, value, f"sampling_params.{name}")
    assign(params, "max_new_tokens", given.take("max_tokens", int, MAX_TOKENS), "sampling_params.max_tokens")
    top_k = given.take("top_k", int, None)
    if top_k is not None:
        assign(params, "top_k", top_k or -1, "sampling_params.top_k")
    stop = given.take("stop", str | list, None)
    if stop is not None:
        assign(params, "stop", [stop] if isinstance(stop, str) else stop, "sampling_params.stop")
    tops = given.take("logprobs", int, None)
    if tops is not None:
        request.return_logprob = True
        assign(request, "top_logprobs_num", tops, "sampling_params.logprobs")
    n = given.take("n", int, 1)
    if not 1 <= n <= 4096:
        raise Reason.FIELD_INVALID.error(f"n is {n}; it must be from 1 to 4096", field="sampling_params.n")
    given.accept("detokenize", "output_kind", "spaces_between_special_tokens", "flat_logprobs", "extra_args")
    return n


def _choice(index: int, sample: RolloutSample) -> dict[str, Any]:
    whole = sample.whole
    reason = whole.finish_reason
    matched = reason.WhichOneof("matched")
    return {
        "index": index,
        "token_ids": sample.output_ids,
        "logprobs": logprobs.chat(whole.output_logprobs, None) if whole.output_logprobs else None,
        "finish_reason": short_name(FinishType.DESCRIPTOR, reason.type or FINISH_TYPE_ABORT),
        "stop_reason": getattr(reason, matched) if matched == "matched_string" else None,
        "weight_versions": [
            {"version": span.version.label, "start": span.start, "end": span.end} for span in whole.versions
        ],
    }


def _usage(samples: Sequence[RolloutSample]) -> dict[str, int]:
    prompt = len(samples[0].prompt_ids)
    generated = sum(len(sample.whole.output_ids) for sample in samples)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def tokenize(call: Call) -> Reply:
    """Token ids of a text, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await call.generation.tokenizers.of(await call.generation.model(fields.take("model", str, "")))
    special = fields.take("add_special_tokens", bool, True)
    tokens = tokenizer.ids(fields.take("prompt", str), special=special)
    return Reply({"tokens": tokens, "count": len(tokens)})


async def detokenize(call: Call) -> Reply:
    """The text of token ids, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await call.generation.tokenizers.of(await call.generation.model(fields.take("model", str, "")))
    return Reply({"prompt": tokenizer.join(fields.take_list("tokens", int))})


async def finish_session(call: Call) -> Reply:
    """The session sends nothing more."""
    session = call.query.get("session_id") or sessions.named(call, (await call.fields()).values)
    if not session:
        raise Reason.FIELD_REQUIRED.error("it is missing", field="session_id")
    await call.generation.finish_session(session)
    return Reply({"status": "ok"})


ROUTES = (
    Route("POST", "/inference/v1/generate", generate, Scope.ROLLOUT),
    Route("POST", "/tokenize", tokenize, Scope.ROLLOUT),
    Route("POST", "/detokenize", detokenize, Scope.ROLLOUT),
    Route("POST", "/finish_session", finish_session, Scope.ROLLOUT),
)
