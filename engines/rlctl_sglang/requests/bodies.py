"""Bodies of SGLang's /generate for a generation request, one for each sample. Pure.

Fields that SGLang would fail on are refused here: a token id outside the vocabulary ends the whole server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl_servers.requests import limits as requests

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import check_pair, seed_of
from rlctl.v1.rollout_pb2 import GenerateRequest

SALT = "extra_key"
"""SGLang's field for a cache salt: a name space of KV entries. SGLang's ``cache_salt`` is a second such field."""

_FIELDS = frozenset(
    {
        *("cache_salt", SALT, "no_logs", "priority", "return_entropy", "return_text_in_logprobs", "routing_key"),
        "token_ids_logprob",
    }
)
GRAMMARS = ("ebnf", "json_schema", "regex", "structural_tag")
_SAMPLING_FIELDS = frozenset(
    # Not stop_regex: its search may take seconds for every token, and SGLang does nothing else meanwhile.
    {"custom_params", *GRAMMARS}
)

_GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class Limits(requests.Limits):
    """Limits of a server.

    Attributes:
        seeds: the server honours seeds (deterministic inference).
        mode: disaggregation_mode of the server: "null", or the part in a pair.
    """

    seeds: bool = False
    mode: str = "null"


def bodies(request: GenerateRequest, rids: Sequence[str], limits: Limits) -> list[dict[str, Any]]:
    """Return a body for each sample, with these ids and without the adapter.

    Raises FIELD_REQUIRED, FIELD_INVALID, FIELD_CONFLICT, PROMPT_TOO_LONG, UNSUPPORTED, naming the field.
    """
    check_pair(request, limits.mode)
    if limits.mode != "null" and not request.HasField("bootstrap_version_seq"):
        raise Reason.FIELD_REQUIRED.error(
            "SGLang does not compare the versions of a pair: the version at the pick is required",
            field="bootstrap_version_seq",
        )
    prompt, length = _prompt(request, limits)
    start = requests.logprob_start(request, length)
    body: dict[str, Any] = {
        **prompt,
        "stream": True,
        "sampling_params": _sampling(request, limits, length),
        "return_logprob": request.return_logprob or request.top_logprobs_num > 0 or start >= 0,
        "logprob_start_len": start,
        "top_logprobs_num": request.top_logprobs_num,
        "return_prompt_token_ids": "text" in prompt,
    }
    if request.top_logprobs_num > limits.vocab_size:
        raise Reason.FIELD_INVALID.error(
            f"top_logprobs_num is {request.top_logprobs_num} of {limits.vocab_size} tokens", field="top_logprobs_num"
        )
    fields, sampling = requests.engine_fields(request, _FIELDS, _SAMPLING_FIELDS)
    _check_ids(fields.get("token_ids_logprob"), limits)
    body |= fields
    body["sampling_params"] |= sampling
    sample_bodies = []
    for index, rid in enumerate(rids):
        sample_body = {**body, "rid": rid}
        if limits.mode != "null":
            # SGLang numbers the rooms of a batch like this, for every sample.
            sample_body |= {
                "bootstrap_host": request.bootstrap_host,
                "bootstrap_port": request.bootstrap_port,
                "bootstrap_room": request.bootstrap_room + index,
            }
        if (seed := seed_of(request.sampling_params, index)) is not None:
            sample_body["sampling_params"] = {**body["sampling_params"], "sampling_seed": seed}
        sample_bodies.append(sample_body)
    return sample_bodies


def has_grammar(request: GenerateRequest) -> bool:
    """Return whether SGLang compiles a grammar before the request begins."""
    sampling = request.engine_fields.fields["sampling_params"] if "sampling_params" in request.engine_fields else None
    return sampling is not None and any(name in sampling.struct_value for name in GRAMMARS)


def _prompt(request: GenerateRequest, limits: Limits) -> tuple[dict[str, Any], int | None]:
    """Return the prompt's field, and its length in tokens if known."""
    requests.refuse_prompt(request, limits)
    if request.WhichOneof("prompt") == "text":
        if not request.text:
            raise Reason.FIELD_REQUIRED.error("the prompt has no tokens", field="text")
        return {"text": request.text}, None
    requests.check_ids(request.input_ids.ids, limits, "input_ids.ids")
    ids = list(request.input_ids.ids)
    return {"input_ids": ids}, len(ids)


def _sampling(request: GenerateRequest, limits: Limits, length: int | None) -> dict[str, Any]:
    params = request.sampling_params
    fields = requests.sampling_fields(params, limits)
    if params.HasField("seed") and not limits.seeds:
        raise Reason.UNSUPPORTED.error(
            "SGLang honours seeds with --enable-deterministic-inference only",
            field="sampling_params.seed",
            next_step="Start it with --option enable_deterministic_inference=true, on a device that has it.",
        )
    if params.stop_token_ids and params.ignore_eos:
        raise Reason.UNSUPPORTED.error(
            "SGLang ignores stop_token_ids with ignore_eos", field="sampling_params.stop_token_ids"
        )
    new_tokens = requests.new_tokens(params, limits, length)
    for name in ("stop", "stop_token_ids"):
        if not fields[name]:
            del fields[name]
    return {
        **fields,
        "max_new_tokens": new_tokens,
        "min_new_tokens": min(params.min_new_tokens, new_tokens),
        "temperature": requests.temperature(params, _GREEDY_BELOW),
        "top_k": params.top_k if params.HasField("top_k") else -1,
        "no_stop_trim": params.no_stop_trim,
    }


def _check_ids(ids: Any, limits: Limits) -> None:
    """Raise FIELD_INVALID unless a Struct's numbers are token ids of the vocabulary. Other ids end the server."""
    if ids is None:
        return
    valid = isinstance(ids, list) and all(
        isinstance(token_id, float) and token_id.is_integer() and 0 <= token_id < limits.vocab_size for token_id in ids
    )
    if not valid:
        raise Reason.FIELD_INVALID.error(
            f"token_ids_logprob takes a list of token ids below {limits.vocab_size}", field="engine_fields"
        )
    ids[:] = [int(token_id) for token_id in ids]
