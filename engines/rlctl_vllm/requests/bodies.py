"""From a generation request to bodies of vLLM's /inference/v1/generate, a body for each sample. Pure.

vLLM ignores unknown fields, so only known fields are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl_servers.requests import limits as requests

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import check_pair, seed_of
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams

PROCESSED = "processed_logprobs"
"""vLLM's mode with log probabilities after temperature."""

SALT = "cache_salt"
MOST_SALT = 128
"""vLLM's field for a cache salt, and the longest value (``validate_cache_salt``, 0.32.0)."""

_FIELDS = frozenset({SALT, "priority"})
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""vLLM's names in ``structured_outputs``, by SGLang's names."""
_SAMPLING_FIELDS = frozenset({"allowed_token_ids", "bad_words", "logit_bias", "structured_outputs", *GRAMMARS})

_GREEDY_BELOW = 1e-5
"""Lower temperatures are 0 to vLLM (``_SAMPLING_EPS`` in ``vllm/sampling_params.py``)."""


@dataclass(frozen=True)
class Limits(requests.Limits):
    """Limits of requests at the server.

    Attributes:
        most_logprobs: most log probabilities that the server returns for a position; -1: all.
        logprobs_mode: vLLM's mode of log probabilities.
        any_logprobs: log probabilities of every mode are accepted, not only rlctl's.
        no_prompt_logprobs: why log probabilities of a prompt would end the server, or "".
    """

    most_logprobs: int = 20
    logprobs_mode: str = PROCESSED
    any_logprobs: bool = False
    no_prompt_logprobs: str = ""

    def refuse_prompt_logprobs(self, field: str) -> None:
        """Raise UNSUPPORTED if log probabilities of a prompt would end the server."""
        if self.no_prompt_logprobs:
            raise Reason.UNSUPPORTED.error(
                self.no_prompt_logprobs, field=field, next_step="Ask for log probabilities of the output only."
            )


def scores_only(request: GenerateRequest) -> bool:
    """Whether the request generates nothing. vLLM generates at least a single token, which is dropped then."""
    params = request.sampling_params
    return params.HasField("max_new_tokens") and params.max_new_tokens == 0


def bodies(request: GenerateRequest, ids: Sequence[int], rids: Sequence[str], limits: Limits) -> list[dict[str, Any]]:
    """Return a body for each sample, under the ids ``rids`` and without the adapter; ``ids`` are the prompt.

    vLLM does not stream log probabilities of the prompt, so a body with these asks for a single answer.

    Raises FIELD_REQUIRED, FIELD_INVALID, PROMPT_TOO_LONG, UNSUPPORTED, naming the field.
    """
    check_pair(request, "null")
    requests.check_ids(ids, limits, "text" if request.WhichOneof("prompt") == "text" else "input_ids.ids")
    stream = requests.logprob_start(request, len(ids)) < 0
    body: dict[str, Any] = {
        "token_ids": list(ids),
        "sampling_params": _sampling(request, len(ids), limits),
        "stream": stream,
        "output_mode": "text" if limits.tokenizer else "tokens",
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    fields, sampling = requests.engine_fields(request, _FIELDS, _SAMPLING_FIELDS)
    body |= fields
    body["sampling_params"] |= structured(sampling)
    sample_bodies = []
    for index, rid in enumerate(rids):
        sample_body = {**body, "request_id": rid}
        if (seed := seed_of(request.sampling_params, index)) is not None:
            sample_body["sampling_params"] = {**body["sampling_params"], "seed": seed}
        sample_bodies.append(sample_body)
    return sample_bodies


def structured(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with SGLang's grammars as vLLM's ``structured_outputs``. Raises FIELD_CONFLICT."""
    shapes = {GRAMMARS[name]: value for name, value in sampling.items() if name in GRAMMARS}
    if not shapes:
        return dict(sampling)
    if len(shapes) > 1 or "structured_outputs" in sampling:
        raise Reason.FIELD_CONFLICT.error(f"{', '.join(shapes)} exclude each other", field="sampling_params")
    plain = {name: value for name, value in sampling.items() if name not in GRAMMARS}
    return {**plain, "structured_outputs": shapes}


def _sampling(request: GenerateRequest, length: int, limits: Limits) -> dict[str, Any]:
    params = request.sampling_params
    fields = requests.sampling_fields(params, limits)
    new_tokens = max(requests.new_tokens(params, limits, length), 1)
    temperature = requests.temperature(params, _GREEDY_BELOW)
    sampling: dict[str, Any] = {
        **fields,
        "n": 1,
        "max_tokens": new_tokens,
        "min_tokens": min(params.min_new_tokens, new_tokens),
        "temperature": temperature,
        "top_k": max(params.top_k, 0) if params.HasField("top_k") else 0,
        "include_stop_str_in_output": params.no_stop_trim,
        "detokenize": limits.tokenizer,
    }
    if (request.return_logprob or request.top_logprobs_num) and not limits.any_logprobs:
        _refuse_other_logprobs(params, temperature, limits)
    # The sampled token counts among the most likely tokens, within the requested number: ask for an extra token.
    tops = min(request.top_logprobs_num + 1, limits.vocab_size) if request.top_logprobs_num else 0
    if request.top_logprobs_num > limits.vocab_size or -1 < limits.most_logprobs < tops:
        limit = limits.vocab_size if limits.most_logprobs < 0 else min(limits.most_logprobs - 1, limits.vocab_size)
        raise Reason.FIELD_INVALID.error(
            f"top_logprobs_num is {request.top_logprobs_num}; this server gives {limit}", field="top_logprobs_num"
        )
    if request.return_logprob or request.top_logprobs_num:
        sampling["logprobs"] = tops
    if requests.logprob_start(request) >= 0:
        limits.refuse_prompt_logprobs("logprob_start_len")
        sampling["prompt_logprobs"] = tops
    return sampling


def _refuse_other_logprobs(params: SamplingParams, temperature: float, limits: Limits) -> None:
    """Refuse log probabilities that differ from rlctl's: after temperature, before top_p, top_k and min_p.

    vLLM's are before all of these, or after.
    """
    if limits.logprobs_mode == PROCESSED:
        cut = {
            "top_p": params.HasField("top_p") and params.top_p < 1,
            "top_k": params.HasField("top_k") and params.top_k > 0,
            "min_p": params.min_p > 0,
        }
        if temperature and (filters := [name for name, active in cut.items() if active]):
            raise Reason.UNSUPPORTED.error(
                f"vLLM would return log probabilities after {filters[0]}",
                field=f"sampling_params.{filters[0]}",
                next_step="Ask for no log probabilities, or leave it out.",
            )
        return
    penalised = params.frequency_penalty or params.presence_penalty or params.repetition_penalty not in (0.0, 1.0)
    if limits.logprobs_mode != "raw_logprobs" or penalised or temperature not in (0.0, 1.0):
        raise Reason.UNSUPPORTED.error(
            f"this vLLM's log probabilities ({limits.logprobs_mode}) are not taken after temperature",
            field="return_logprob",
            next_step=f"Start it with --logprobs-mode {PROCESSED}.",
        )
