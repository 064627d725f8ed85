"""From a generation request to the bodies of SGLang's /generate, one for each sample. Pure.

Whatever SGLang would fail on is refused here: a token id that is not in the vocabulary ends the whole server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from rlctl.errors import Reason
from rlctl.sampling import DEFAULT_NEW_TOKENS, check_sampling
from rlctl.v1.rollout_pb2 import GenerateRequest

_FIELDS = frozenset(
    {
        *("cache_salt", "extra_key", "no_logs", "priority", "return_entropy", "return_text_in_logprobs", "routing_key"),
        "token_ids_logprob",
    }
)
_SAMPLING_FIELDS = frozenset(
    {"custom_params", "ebnf", "json_schema", "regex", "spaces_between_special_tokens", "stop_regex", "structural_tag"}
)

_GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class Limits:
    """What the server can take.

    Attributes:
        vocab_size: token ids are below it.
        context_length: longest sequence in tokens.
        longest_prompt: longest prompt in tokens.
        tokenizer: it takes and gives text.
        seeds: it honours seeds (deterministic inference).
    """

    vocab_size: int
    context_length: int
    longest_prompt: int
    tokenizer: bool = True
    seeds: bool = False


def bodies(request: GenerateRequest, rids: Sequence[str], limits: Limits) -> list[dict[str, Any]]:
    """One body for each sample, under these ids, its adapter left out.

    Raises FIELD_REQUIRED, FIELD_INVALID, FIELD_CONFLICT, PROMPT_TOO_LONG, UNSUPPORTED, naming the field.
    """
    prompt, length = _prompt(request, limits)
    sampling = _sampling(request, limits, length)
    body: dict[str, Any] = {
        **prompt,
        "stream": True,
        "sampling_params": sampling,
        "return_logprob": request.return_logprob or request.top_logprobs_num > 0 or _start(request) >= 0,
        "logprob_start_len": _start(request),
        "top_logprobs_num": request.top_logprobs_num,
        "return_prompt_token_ids": "text" in prompt,
    }
    if request.top_logprobs_num > limits.vocab_size:
        raise Reason.FIELD_INVALID.error(
            f"top_logprobs_num is {request.top_logprobs_num} of {limits.vocab_size} tokens", field="top_logprobs_num"
        )
    if length is not None and _start(request) > length:
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {_start(request)}, the prompt has {length} tokens", field="logprob_start_len"
        )
    _add_fields(body, request, limits)
    made = []
    for index, rid in enumerate(rids):
        seeded = {**body, "rid": rid}
        if request.sampling_params.HasField("seed"):
            seed = (request.sampling_params.seed + index) % (1 << 63)
            seeded["sampling_params"] = {**body["sampling_params"], "sampling_seed": seed}
        made.append(seeded)
    return made


def _prompt(request: GenerateRequest, limits: Limits) -> tuple[dict[str, Any], int | None]:
    """The prompt's field, and its length in tokens where that is known."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise Reason.FIELD_REQUIRED.error("there is neither text nor input_ids", field="text")
    if kind == "text":
        if not limits.tokenizer:
            raise Reason.UNSUPPORTED.error("the server has no tokenizer; send input_ids", field="text")
        if not request.text:
            raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field="text")
        return {"text": request.text}, None
    ids = list(request.input_ids.ids)
    if not ids:
        raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field="input_ids.ids")
    if max(ids) >= limits.vocab_size:
        raise Reason.FIELD_INVALID.error(
            f"token {max(ids)} is not in the vocabulary of {limits.vocab_size}", field="input_ids.ids"
        )
    if len(ids) > limits.longest_prompt:
        raise Reason.PROMPT_TOO_LONG.error(
            f"the prompt has {len(ids)} tokens; {limits.longest_prompt} fit beside the output",
            metadata={"prompt_tokens": str(len(ids)), "context_length": str(limits.context_length)},
        )
    return {"input_ids": ids}, len(ids)


def _sampling(request: GenerateRequest, limits: Limits, length: int | None) -> dict[str, Any]:
    params = request.sampling_params
    check_sampling(params, limits.vocab_size)
    if params.HasField("seed") and not limits.seeds:
        raise Reason.UNSUPPORTED.error(
            "SGLang honours seeds with --enable-deterministic-inference only",
            field="sampling_params.seed",
            next_step="Start it with --option enable_deterministic_inference=true, on a device that has it.",
        )
    if params.stop and not limits.tokenizer:
        raise Reason.UNSUPPORTED.error("the server has no tokenizer to find stop strings with", field="stop")
    if params.stop_token_ids and params.ignore_eos:
        raise Reason.UNSUPPORTED.error(
            "together with ignore_eos SGLang ignores them", field="sampling_params.stop_token_ids"
        )
    new_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    if length is not None:
        # SGLang refuses what it would have to cut.
        new_tokens = min(new_tokens, limits.context_length - length)
    temperature = params.temperature if params.HasField("temperature") else 1.0
    sampling: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": min(params.min_new_tokens, new_tokens),
        "temperature": 0.0 if temperature < _GREEDY_BELOW else temperature,
        "top_p": params.top_p if params.HasField("top_p") else 1.0,
        "top_k": params.top_k if params.HasField("top_k") else -1,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        "no_stop_trim": params.no_stop_trim,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    return sampling


def _add_fields(body: dict[str, Any], request: GenerateRequest, limits: Limits) -> None:
    """SGLang's own fields, those that cannot contradict or endanger anything."""
    fields = MessageToDict(request.engine_fields) if request.HasField("engine_fields") else {}
    sampling = fields.pop("sampling_params", {})
    for given, known, where in (
        (fields, _FIELDS, "engine_fields"),
        (sampling, _SAMPLING_FIELDS, "engine_fields.sampling_params"),
    ):
        if not isinstance(given, dict) or (unknown := sorted(given.keys() - known)):
            what = f"{', '.join(unknown)} cannot be given" if isinstance(given, dict) else "it is no object"
            raise Reason.FIELD_INVALID.error(f"{what} here; there are: {', '.join(sorted(known))}", field=where)
    _check_ids(fields.get("token_ids_logprob"), limits)
    body.update(fields)
    body["sampling_params"] |= sampling


def _check_ids(ids: Any, limits: Limits) -> None:
    """Of a Struct's numbers: token ids are whole ones, and one that is not in the vocabulary ends the server."""
    if ids is None:
        return
    known = isinstance(ids, list) and all(
        isinstance(each, float) and each.is_integer() and 0 <= each < limits.vocab_size for each in ids
    )
    if not known:
        raise Reason.FIELD_INVALID.error(
            f"token_ids_logprob takes a list of token ids below {limits.vocab_size}", field="engine_fields"
        )
    ids[:] = [int(each) for each in ids]


def _start(request: GenerateRequest) -> int:
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    if start < -1:
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {start}; it must be -1 or a position", field="logprob_start_len"
        )
    return start
