"""From a body of SGLang's /generate to requests, one for each prompt. Pure.

vLLM ignores what it does not know, so whatever is not known here is refused, and so is what would be dropped.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import Reason
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds

_EACH = ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that a batch may give for each prompt."""

_KNOWN = frozenset(
    {
        *_EACH,
        *("text", "input_ids", "input_tokens", "stream", "return_prompt_token_ids", "priority", "cache_salt"),
    }
)
_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("input_embeds", "image_data", "video_data", "audio_data", "modalities", "lora_path", "token_ids_logprob"),
            *("session_id", "session_params", "routed_dp_rank", "custom_logit_processor", "routing_key", "extra_key"),
            *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "return_entropy"),
            *("return_sampling_mask", "background"),
        ),
        (None, False),
    ),
    **dict.fromkeys(("no_logs", "log_metrics"), (None, False, True)),
}
"""Fields of SGLang's that vLLM has nothing for, and the values that ask for nothing."""

_SAMPLING = {
    **{name: name for name in SamplingParams.DESCRIPTOR.fields_by_name if name != "seed"},
    "sampling_seed": "seed",
}
_STRUCTURED = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
_EXTRA = ("spaces_between_special_tokens", "logit_bias")
_SAMPLING_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stop_regex", "custom_params", "stream_interval"), (None,)),
}


@dataclass(frozen=True)
class Asked:
    """One prompt.

    Attributes:
        rid: the caller's name for it.
        request: what is asked, in rlctl's words.
        sampling: vLLM's sampling parameters that rlctl has no words for.
        fields: vLLM's other fields.
        show_prompt: the prompt's token ids are to be told.
    """

    rid: str
    request: GenerateRequest
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    show_prompt: bool = False

    @property
    def samples(self) -> int:
        """How many samples of it are wanted."""
        return self.request.sampling_params.n or 1


@dataclass(frozen=True)
class Asking:
    """One call of /generate.

    Attributes:
        prompts: what it asks for.
        listed: the answer is a list.
        stream: it comes as it is made.
    """

    prompts: Sequence[Asked]
    listed: bool
    stream: bool


def read(body: Any) -> Asking:
    """A parsed body. Raises FIELD_REQUIRED, FIELD_INVALID, FIELD_CONFLICT, LENGTH_MISMATCH, UNSUPPORTED."""
    if not isinstance(body, dict):
        raise Reason.FIELD_INVALID.error("the body is no JSON object")
    _refuse_unknown(body, _KNOWN, _WITHOUT, "")
    stream = _flag(body, "stream")
    name, prompts, batch = _prompts(body)
    each = [_fields_of(body, index, len(prompts) if batch else None) for index in range(len(prompts))]
    made = []
    for index, (prompt, fields) in enumerate(zip(prompts, each, strict=True)):
        rid = fields.get("rid")
        if rid is not None and (not isinstance(rid, str) or not rid):
            raise Reason.FIELD_INVALID.error("it must be a text, not empty", field="rid")
        if rid and batch and not isinstance(body["rid"], list):
            rid = f"{rid}_{index}"
        made.append(_asked(body, name, prompt, fields, rid or uuid.uuid4().hex))
    rids = [asked.rid for asked in made]
    if len(set(rids)) < len(rids):
        raise Reason.FIELD_INVALID.error("two prompts have the same rid", field="rid")
    return Asking(made, batch or made[0].samples > 1, stream)


def _prompts(body: Mapping[str, Any]) -> tuple[str, list[Any], bool]:
    """(field, prompts, whether they are a batch)."""
    given = [name for name in ("text", "input_ids", "input_tokens") if body.get(name) is not None]
    if given == ["input_ids", "input_tokens"] and body["input_ids"] == body["input_tokens"]:
        given = ["input_ids"]
    if not given:
        raise Reason.FIELD_REQUIRED.error("there is neither text nor input_ids", field="text")
    if len(given) > 1:
        raise Reason.FIELD_CONFLICT.error(f"{given[0]} and {given[1]} differ; give one of them", field=given[1])
    name = given[0]
    value = body[name]
    if name == "text":
        batch = isinstance(value, list)
        prompts = value if batch else [value]
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise Reason.FIELD_INVALID.error("it must be a text, or a list of texts", field=name)
    else:
        batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        prompts = value if batch else [value]
        if not all(isinstance(prompt, list) for prompt in prompts):
            raise Reason.FIELD_INVALID.error("it must be a list of token ids, or a list of those", field=name)
    if not prompts:
        raise Reason.FIELD_REQUIRED.error("there is no prompt", field=name)
    return name, prompts, batch


def _fields_of(body: Mapping[str, Any], index: int, size: int | None) -> dict[str, Any]:
    """The fields of one prompt; ``size``: of the batch."""
    fields = {}
    for name in _EACH:
        value = body.get(name)
        if isinstance(value, list):
            if size is None:
                raise Reason.FIELD_INVALID.error("a list is for a batch of prompts", field=name)
            if len(value) != size:
                raise Reason.LENGTH_MISMATCH.error(f"{len(value)} of them for {size} prompts", field=name)
            value = value[index]
        fields[name] = value
    return fields


def _asked(body: Mapping[str, Any], name: str, prompt: Any, fields: Mapping[str, Any], rid: str) -> Asked:
    given = fields["sampling_params"]
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise Reason.FIELD_INVALID.error("it must be an object", field="sampling_params")
    _refuse_unknown(given, frozenset({*_SAMPLING, *_STRUCTURED, *_EXTRA}), _SAMPLING_WITHOUT, "sampling_params.")
    request = GenerateRequest(rid=rid, sampling_params=_sampling(given))
    if name == "text":
        request.text = prompt
    else:
        request.input_ids.CopyFrom(_made(TokenIds, "ids", prompt, name))
    request.return_logprob = _flag(fields, "return_logprob")
    tops = fields["top_logprobs_num"]
    start = fields["logprob_start_len"]
    if request.return_logprob:  # without it SGLang looks at neither
        if tops is not None:
            _set(request, "top_logprobs_num", tops, "top_logprobs_num")
        if start is not None:
            _set(request, "logprob_start_len", start, "logprob_start_len")
    extra: dict[str, Any] = {key: given[key] for key in _EXTRA if given.get(key) is not None}
    shapes = {ours: given[key] for key, ours in _STRUCTURED.items() if given.get(key) is not None}
    if len(shapes) > 1:
        raise Reason.FIELD_CONFLICT.error(f"{', '.join(shapes)} exclude each other", field="sampling_params")
    if shapes:
        extra["structured_outputs"] = shapes
    other = {key: body[key] for key in ("priority", "cache_salt") if body.get(key) is not None}
    return Asked(rid, request, extra, other, _flag(body, "return_prompt_token_ids"))


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    params = SamplingParams()
    for name, ours in _SAMPLING.items():
        value = given.get(name)
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        _set(params, ours, value, f"sampling_params.{name}")
    if "n" in given and given["n"] is not None and given["n"] < 1:
        raise Reason.FIELD_INVALID.error("n is 0; it must be 1 or more", field="sampling_params.n")
    return params


def _set(message: Any, name: str, value: Any, field_: str) -> None:
    """Set a field, or say which one has a wrong value. A bool is no number, and no number is a bool."""
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    flag = descriptor.cpp_type == descriptor.CPPTYPE_BOOL
    if isinstance(value, bool) is flag:
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError):
            pass
        else:
            return
    raise Reason.FIELD_INVALID.error(f"{value!r} is no value for it", field=field_)


def _made(kind: Any, name: str, value: Any, field_: str) -> Any:
    try:
        return kind(**{name: value})
    except (TypeError, ValueError):
        raise Reason.FIELD_INVALID.error("it holds what is no token id", field=field_) from None


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise Reason.FIELD_INVALID.error(f"{value!r} is neither true nor false", field=name)
    return bool(value)


def _refuse_unknown(
    given: Mapping[str, Any], known: frozenset[str], without: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    for name, value in given.items():
        if name in known:
            continue
        if name not in without:
            raise Reason.FIELD_INVALID.error("there is no such field", field=f"{where}{name}")
        if not any(value is nothing for nothing in without[name]):
            raise Reason.UNSUPPORTED.error(f"vLLM cannot do what {name} asks for", field=f"{where}{name}")
