"""From a generation request to the bodies of vLLM's /inference/v1/generate, one for each sample. Pure.

vLLM ignores what it does not know, so nothing is passed on that is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from rlctl.errors import Reason
from rlctl.sampling import DEFAULT_NEW_TOKENS, check_sampling
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams

PROCESSED = "processed_logprobs"
"""vLLM's mode in which log probabilities are those after temperature."""

_FIELDS = frozenset({"cache_salt", "priority"})
_SAMPLING_FIELDS = frozenset({"allowed_token_ids", "bad_words", "logit_bias", "structured_outputs"})

_GREEDY_BELOW = 1e-5
"""Temperatures below it are 0 to vLLM (``_SAMPLING_EPS`` in ``vllm/sampling_params.py``)."""


@dataclass(frozen=True)
class Limits:
    """What the server can take.

    Attributes:
        vocab_size: token ids are below it.
        context_length: longest sequence in tokens.
        longest_prompt: longest prompt in tokens.
        tokenizer: it takes and gives text.
        most_logprobs: how many log probabilities at a position it gives; -1: all.
        logprobs_mode: which log probabilities those are.
    """

    vocab_size: int
    context_length: int
    longest_prompt: int
    tokenizer: bool = True
    most_logprobs: int = 20
    logprobs_mode: str = PROCESSED


def logprob_start(request: GenerateRequest) -> int:
    """From which position on the prompt's log probabilities are wanted; -1: none. Raises FIELD_INVALID."""
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    if start < -1:
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {start}; it must be -1 or a position", field="logprob_start_len"
        )
    return start


def scores_only(request: GenerateRequest) -> bool:
    """Whether nothing is to be generated. vLLM generates at least one token, which is left out then."""
    params = request.sampling_params
    return params.HasField("max_new_tokens") and params.max_new_tokens == 0


def refuse_prompt(request: GenerateRequest, limits: Limits) -> None:
    """Raise FIELD_REQUIRED or UNSUPPORTED for a prompt that cannot be one."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise Reason.FIELD_REQUIRED.error("there is neither text nor input_ids", field="text")
    if kind == "text" and not limits.tokenizer:
        raise Reason.UNSUPPORTED.error("the server has no tokenizer; send input_ids", field="text")


def bodies(request: GenerateRequest, ids: Sequence[int], rids: Sequence[str], limits: Limits) -> list[dict[str, Any]]:
    """One body for each sample, under these ids; ``ids``: the prompt.

    With log probabilities of the prompt, which vLLM does not stream, they ask for one answer.

    Raises FIELD_REQUIRED, FIELD_INVALID, PROMPT_TOO_LONG, UNSUPPORTED, naming the field.
    """
    if request.adapter:
        raise Reason.UNSUPPORTED.error("adapters are not driven through this engine yet", field="adapter")
    _check_prompt(request, ids, limits)
    start = logprob_start(request)
    if start > len(ids):
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {start}, the prompt has {len(ids)} tokens", field="logprob_start_len"
        )
    sampling = _sampling(request, len(ids), limits)
    stream = start < 0
    body: dict[str, Any] = {
        "token_ids": list(ids),
        "sampling_params": sampling,
        "stream": stream,
        "output_mode": "text" if limits.tokenizer else "tokens",
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    _add_fields(body, request)
    made = []
    for index, rid in enumerate(rids):
        one = {**body, "request_id": rid}
        if request.sampling_params.HasField("seed"):
            seed = (request.sampling_params.seed + index) % (1 << 63)
            one["sampling_params"] = {**body["sampling_params"], "seed": seed}
        made.append(one)
    return made


def _check_prompt(request: GenerateRequest, ids: Sequence[int], limits: Limits) -> None:
    field = "text" if request.WhichOneof("prompt") == "text" else "input_ids.ids"
    if not ids:
        raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field=field)
    if max(ids) >= limits.vocab_size:
        raise Reason.FIELD_INVALID.error(
            f"token {max(ids)} is not in the vocabulary of {limits.vocab_size}", field=field
        )
    if len(ids) > limits.longest_prompt:
        raise Reason.PROMPT_TOO_LONG.error(
            f"the prompt has {len(ids)} tokens; {limits.longest_prompt} fit beside the output",
            metadata={"prompt_tokens": str(len(ids)), "context_length": str(limits.context_length)},
        )


def _sampling(request: GenerateRequest, length: int, limits: Limits) -> dict[str, Any]:
    params = request.sampling_params
    check_sampling(params, limits.vocab_size)
    if params.stop and not limits.tokenizer:
        raise Reason.UNSUPPORTED.error("the server has no tokenizer to find stop strings with", field="stop")
    new_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    new_tokens = max(min(new_tokens, limits.context_length - length), 1)
    temperature = params.temperature if params.HasField("temperature") else 1.0
    sampling: dict[str, Any] = {
        "n": 1,
        "max_tokens": new_tokens,
        "min_tokens": min(params.min_new_tokens, new_tokens),
        "temperature": 0.0 if temperature < _GREEDY_BELOW else temperature,
        "top_p": params.top_p if params.HasField("top_p") else 1.0,
        "top_k": max(params.top_k, 0) if params.HasField("top_k") else 0,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        "include_stop_str_in_output": params.no_stop_trim,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "detokenize": limits.tokenizer,
    }
    if request.return_logprob or request.top_logprobs_num:
        _refuse_other_logprobs(params, temperature, limits)
    # The sampled token's comes beside the most likely ones, within the number asked for: one more makes room for it.
    tops = min(request.top_logprobs_num + 1, limits.vocab_size) if request.top_logprobs_num else 0
    if request.top_logprobs_num > limits.vocab_size or -1 < limits.most_logprobs < tops:
        most = limits.vocab_size if limits.most_logprobs < 0 else min(limits.most_logprobs - 1, limits.vocab_size)
        raise Reason.FIELD_INVALID.error(
            f"top_logprobs_num is {request.top_logprobs_num}; this server gives {most}", field="top_logprobs_num"
        )
    if request.return_logprob or request.top_logprobs_num:
        sampling["logprobs"] = tops
    if logprob_start(request) >= 0:
        sampling["prompt_logprobs"] = tops
    return sampling


def _refuse_other_logprobs(params: SamplingParams, temperature: float, limits: Limits) -> None:
    """rlctl's are those after temperature and before top_p, top_k and min_p. vLLM's are before all of it, or after."""
    if limits.logprobs_mode == PROCESSED:
        cut = {
            "top_p": params.HasField("top_p") and params.top_p < 1,
            "top_k": params.HasField("top_k") and params.top_k > 0,
            "min_p": params.min_p > 0,
        }
        if temperature >= _GREEDY_BELOW and (named := [name for name, given in cut.items() if given]):
            raise Reason.UNSUPPORTED.error(
                f"vLLM's log probabilities would be those after {named[0]}",
                field=f"sampling_params.{named[0]}",
                next_step="Ask for no log probabilities, or leave it out.",
            )
        return
    penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty not in (0.0, 1.0)
    if limits.logprobs_mode != "raw_logprobs" or penalised or not (temperature < _GREEDY_BELOW or temperature == 1):
        raise Reason.UNSUPPORTED.error(
            f"this vLLM's log probabilities ({limits.logprobs_mode}) are not those after temperature",
            field="return_logprob",
            next_step=f"Start it with --logprobs-mode {PROCESSED}.",
        )


def _add_fields(body: dict[str, Any], request: GenerateRequest) -> None:
    """vLLM's own fields, those that cannot contradict or endanger anything."""
    fields = MessageToDict(request.engine_fields) if request.HasField("engine_fields") else {}
    sampling = fields.pop("sampling_params", {})
    for given, known, where in (
        (fields, _FIELDS, "engine_fields"),
        (sampling, _SAMPLING_FIELDS, "engine_fields.sampling_params"),
    ):
        if not isinstance(given, dict) or (unknown := sorted(given.keys() - known)):
            what = f"{', '.join(unknown)} cannot be given" if isinstance(given, dict) else "it is no object"
            raise Reason.FIELD_INVALID.error(f"{what} here; there are: {', '.join(sorted(known))}", field=where)
    body.update(fields)
    body["sampling_params"] |= sampling
