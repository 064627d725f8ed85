"""Limits of generation requests for all engine servers, checked before a request is sent. Pure.

A token id outside the vocabulary ends an SGLang server. vLLM ignores unknown fields.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import DEFAULT_NEW_TOKENS, check_sampling
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        vocab_size: token ids are smaller.
        context_length: longest sequence in tokens.
        longest_prompt: longest prompt in tokens.
        tokenizer: the server accepts and returns text.
    """

    vocab_size: int
    context_length: int
    longest_prompt: int
    tokenizer: bool = True


def refuse_prompt(request: GenerateRequest, limits: Limits) -> None:
    """Raise FIELD_REQUIRED for a missing prompt, UNSUPPORTED for text at a server without tokenizer."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise Reason.FIELD_REQUIRED.error("text or input_ids is required", field="text")
    if kind == "text" and not limits.tokenizer:
        raise Reason.UNSUPPORTED.error("the server has no tokenizer; send input_ids", field="text")


def check_ids(ids: Sequence[int], limits: Limits, field: str) -> None:
    """Raise FIELD_REQUIRED, FIELD_INVALID or PROMPT_TOO_LONG for the token ids of a prompt from ``field``."""
    if not ids:
        raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field=field)
    # Checked before the ids: a message can have millions of ids, and nothing else runs meanwhile.
    if len(ids) > limits.longest_prompt:
        raise Reason.PROMPT_TOO_LONG.error(
            f"the prompt has {len(ids)} tokens; {limits.longest_prompt} fit beside the output",
            metadata={"prompt_tokens": str(len(ids)), "context_length": str(limits.context_length)},
        )
    if max(ids) >= limits.vocab_size:
        raise Reason.FIELD_INVALID.error(
            f"token {max(ids)} is not in the vocabulary of {limits.vocab_size}", field=field
        )


def logprob_start(request: GenerateRequest, length: int | None = None) -> int:
    """Return the first position of the requested log probabilities of the prompt, or -1.

    ``length``: length of the prompt in tokens, if known. Raises FIELD_INVALID.
    """
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    if start < -1:
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {start}; it must be -1 or a position", field="logprob_start_len"
        )
    if length is not None and start > length:
        raise Reason.FIELD_INVALID.error(
            f"logprob_start_len is {start}, the prompt has {length} tokens", field="logprob_start_len"
        )
    return start


def new_tokens(params: SamplingParams, limits: Limits, length: int | None) -> int:
    """Return the limit of new tokens, cut to the context length. Servers refuse a higher limit."""
    requested = params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS
    return requested if length is None else min(requested, limits.context_length - length)


def temperature(params: SamplingParams, greedy_below: float) -> float:
    """Return the temperature, or 0 for values below ``greedy_below``."""
    requested = params.temperature if params.HasField("temperature") else 1.0
    return 0.0 if requested < greedy_below else requested


def sampling_fields(params: SamplingParams, limits: Limits) -> dict[str, Any]:
    """Return the sampling fields with the same name everywhere. Raises as :func:`check_sampling`, and UNSUPPORTED."""
    check_sampling(params, limits.vocab_size)
    if params.stop and not limits.tokenizer:
        raise Reason.UNSUPPORTED.error("the server has no tokenizer to find stop strings with", field="stop")
    fields = {
        "top_p": params.top_p if params.HasField("top_p") else 1.0,
        "min_p": params.min_p,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "repetition_penalty": params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
    }
    if params.HasField("spaces_between_special_tokens"):
        fields["spaces_between_special_tokens"] = params.spaces_between_special_tokens
    return fields


def engine_fields(
    request: GenerateRequest, allowed_fields: Collection[str], allowed_sampling: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the server's own fields and its own sampling fields of a request.

    The allowed fields cannot contradict the request or endanger the server. Raises FIELD_INVALID for other fields.
    """
    try:
        fields = MessageToDict(request.engine_fields) if request.HasField("engine_fields") else {}
    except ValueError as error:  # JSON has no NaN
        raise Reason.FIELD_INVALID.error(str(error), field="engine_fields") from error
    sampling = fields.pop("sampling_params", {})
    for values, allowed, where in (
        (fields, allowed_fields, "engine_fields"),
        (sampling, allowed_sampling, "engine_fields.sampling_params"),
    ):
        if not isinstance(values, dict) or (unknown := sorted(values.keys() - set(allowed))):
            cause = f"{', '.join(unknown)} cannot be given" if isinstance(values, dict) else "a JSON object is required"
            raise Reason.FIELD_INVALID.error(f"{cause} here; there are: {', '.join(sorted(allowed))}", field=where)
    return fields, sampling


def refused(product: str, message: str, status: int, too_long: Collection[str]) -> RlctlError:
    """Return the error for a refused request. ``too_long``: words of the server's message about a too long prompt."""
    if status == 400 and any(words in message for words in too_long):
        return Reason.PROMPT_TOO_LONG.error(message)
    if status == 400:
        return Reason.FIELD_INVALID.error(f"{product}: {message}")
    if status == 503:
        return Reason.STAGE_NOT_SERVING.error(f"{product}: {message}")
    return Reason.ENGINE_FAILED.error(f"{product}: {message}")
