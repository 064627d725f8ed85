"""Settings of a generation request, checked and with defaults."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import DEFAULT_NEW_TOKENS, check_sampling
from rlctl.v1.rollout_pb2 import GenerateRequest

GREEDY_BELOW = 1e-6
"""Temperatures below this take the most likely token, because dividing logits by such a temperature would overflow."""


@dataclass(frozen=True)
class Settings:
    """Sampling settings of a request. ``SamplingParams`` and ``GenerateRequest`` define the fields.

    Attributes:
        temperature: 0 means greedy.
        top_k: 0 means all.
        stop_ids: token ids that end the output, including the model's end tokens unless the request ignores these.
        logprob_start: first prompt position with a log probability, or None.
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    n: int
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logprobs: bool
    logprob_start: int | None
    top_logprobs: int

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether only some tokens may be drawn."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether tokens seen before change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


def check(request: GenerateRequest, *, vocab_size: int, eos: frozenset[int], tokenizer: bool) -> Settings:
    """Return the checked settings of a request.

    Raises FIELD_INVALID with the field's path, and UNSUPPORTED for stop strings without a tokenizer.
    """
    if request.engine_fields.fields:
        raise _invalid(f"the torch engine has no fields {', '.join(request.engine_fields.fields)}", "engine_fields")
    params = request.sampling_params
    check_sampling(params, vocab_size)
    if params.stop and not tokenizer:
        raise Reason.UNSUPPORTED.error(
            "the checkpoint has no tokenizer, so there is no text to find stop strings in", field="sampling_params.stop"
        )
    if request.top_logprobs_num > vocab_size:
        raise _invalid(f"top_logprobs_num is {request.top_logprobs_num} of {vocab_size} tokens", "top_logprobs_num")
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    if start < -1:
        raise _invalid(f"logprob_start_len is {start}; it must be -1 or a position", "logprob_start_len")
    temperature = params.temperature if params.HasField("temperature") else 1.0
    return Settings(
        max_new_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else DEFAULT_NEW_TOKENS,
        min_new_tokens=params.min_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        stop=tuple(params.stop),
        stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos),
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=(
            params.spaces_between_special_tokens if params.HasField("spaces_between_special_tokens") else True
        ),
        no_stop_trim=params.no_stop_trim,
        n=params.n or 1,
        seed=params.seed if params.HasField("seed") else None,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        logprobs=request.return_logprob or request.top_logprobs_num > 0,
        logprob_start=None if start < 0 else start,
        top_logprobs=request.top_logprobs_num,
    )


def _invalid(message: str, field: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(message, field=field)
