"""Read a body of SGLang's /generate into requests, one for each prompt. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from rlctl.contract.errors import Reason
from rlctl.contract.json_values import of_kind
from rlctl.contract.sampling import check_samples
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds

_EACH = ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
"""Fields that a batch may give for each prompt."""

_KNOWN = frozenset({*_EACH, "text", "input_ids", "input_tokens", "stream", "return_prompt_token_ids"})

_SAMPLING = {
    **{name: name for name in SamplingParams.DESCRIPTOR.fields_by_name if name != "seed"},
    "sampling_seed": "seed",
}


@dataclass(frozen=True)
class Words:
    """Fields of an engine beyond the contract.

    Attributes:
        product: name of the engine, for messages.
        fields: further supported fields of a body.
        sampling: the same for ``sampling_params``.
        without: unsupported fields, with the values that request nothing.
        sampling_without: the same for ``sampling_params``.
        strict: refuse an unknown field; otherwise list the field in :attr:`Asking.unknown`, as SGLang ignores it.
    """

    product: str
    fields: frozenset[str] = frozenset()
    sampling: frozenset[str] = frozenset()
    without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sampling_without: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class PromptRequest:
    """A prompt of a call.

    Attributes:
        rid: the caller's request id.
        request: the request in the contract's form.
        sampling: the engine's sampling parameters beyond the contract.
        fields: the engine's other fields.
        show_prompt: return the prompt's token ids.
    """

    rid: str
    request: GenerateRequest
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    show_prompt: bool = False

    @property
    def samples(self) -> int:
        return self.request.sampling_params.n or 1


@dataclass(frozen=True)
class Asking:
    """A call of /generate.

    Attributes:
        listed: the reply is a list.
        stream: the reply is streamed.
        unknown: names of unknown fields.
    """

    prompts: Sequence[PromptRequest]
    listed: bool
    stream: bool
    unknown: Sequence[str] = ()


def read(
    body: Any,
    words: Words,
    *,
    check_prompts: Callable[[int, str], None] = lambda _count, _field: None,
    check_bytes: Callable[[int, int], None] = lambda _size, _together: None,
) -> Asking:
    """Read a parsed body. Prompts of token ids may be :class:`TokenIds`.

    Raises FIELD_REQUIRED, FIELD_INVALID, FIELD_CONFLICT, LENGTH_MISMATCH, UNSUPPORTED.

    ``check_prompts`` may refuse the number of prompts before any request is made. ``check_bytes`` may refuse the size
    of a prompt's request, or of all samples so far: a short body may request many samples.
    """
    if not isinstance(body, dict):
        raise Reason.FIELD_INVALID.error("the body is no JSON object", field="body")
    unknown = _unknown(body, _KNOWN | words.fields, words.without, "", words)
    stream = _flag(body, "stream")
    name, prompts, batch = _prompts(body)
    check_prompts(len(prompts), name)
    total_bytes = 0
    each = [_fields_of(body, index, len(prompts) if batch else None) for index in range(len(prompts))]
    entries = []
    for index, (prompt, fields) in enumerate(zip(prompts, each, strict=True)):
        rid = fields.get("rid")
        if rid is not None and (not isinstance(rid, str) or not rid):
            raise Reason.FIELD_INVALID.error("rid must be a non-empty text", field="rid")
        if rid and batch and not isinstance(body["rid"], list):
            rid = f"{rid}_{index}"
        entries.append(_prompt_request(body, name, prompt, fields, rid or uuid.uuid4().hex, words, unknown))
        check_samples(entries[-1].request.sampling_params)
        size = entries[-1].request.ByteSize()
        total_bytes += size * entries[-1].samples
        check_bytes(size, total_bytes)
    rids = [entry.rid for entry in entries]
    if len(set(rids)) < len(rids):
        raise Reason.FIELD_INVALID.error("Duplicate request ID: two prompts have the same rid", field="rid")
    return Asking(entries, batch or entries[0].samples > 1, stream, list(dict.fromkeys(unknown)))


def _prompts(body: Mapping[str, Any]) -> tuple[str, list[Any], bool]:
    """Return (field, prompts, is a batch)."""
    names = [name for name in ("text", "input_ids", "input_tokens") if body.get(name) is not None]
    if names == ["input_ids", "input_tokens"] and body["input_ids"] == body["input_tokens"]:
        names = ["input_ids"]
    if not names:
        raise Reason.FIELD_REQUIRED.error("text or input_ids is required", field="text")
    if len(names) > 1:
        raise Reason.FIELD_CONFLICT.error(f"{names[0]} and {names[1]} differ; set only one field", field=names[1])
    name = names[0]
    value = body[name]
    if name == "text":
        batch = isinstance(value, list)
        prompts = value if batch else [value]
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise Reason.FIELD_INVALID.error(f"{name} must be a text, or a list of texts", field=name)
    else:
        batch = isinstance(value, list) and bool(value) and isinstance(value[0], list | TokenIds)
        prompts = value if batch else [value]
        if not all(isinstance(prompt, list | TokenIds) for prompt in prompts):
            raise Reason.FIELD_INVALID.error(f"{name} must be a list of token ids, or a list of such lists", field=name)
    if not prompts:
        raise Reason.FIELD_REQUIRED.error(f"{name} is empty", field=name)
    return name, prompts, batch


def _fields_of(body: Mapping[str, Any], index: int, size: int | None) -> dict[str, Any]:
    """Return the fields of prompt ``index``; ``size`` is the size of the batch."""
    fields = {}
    for name in _EACH:
        value = body.get(name)
        if isinstance(value, list):
            if size is None:
                raise Reason.FIELD_INVALID.error("a list is for a batch of prompts", field=name)
            if len(value) != size:
                raise Reason.LENGTH_MISMATCH.error(f"{name} has {len(value)} entries for {size} prompts", field=name)
            value = value[index]
        fields[name] = value
    return fields


def _prompt_request(
    body: Mapping[str, Any],
    name: str,
    prompt: Any,
    fields: Mapping[str, Any],
    rid: str,
    words: Words,
    unknown: list[str],
) -> PromptRequest:
    sampling = fields["sampling_params"]
    if sampling is None:
        sampling = {}
    if not isinstance(sampling, dict):
        raise Reason.FIELD_INVALID.error("sampling_params must be an object", field="sampling_params")
    unknown += _unknown(sampling, words.sampling | _SAMPLING.keys(), words.sampling_without, "sampling_params.", words)
    request = GenerateRequest(rid=rid, sampling_params=_sampling(sampling))
    if name == "text":
        request.text = prompt
    else:
        request.input_ids.CopyFrom(prompt if isinstance(prompt, TokenIds) else _made(TokenIds, "ids", prompt, name))
    request.return_logprob = _flag(fields, "return_logprob")
    tops = fields["top_logprobs_num"]
    start = fields["logprob_start_len"]
    if request.return_logprob:  # SGLang ignores both without return_logprob
        if tops is not None:
            assign(request, "top_logprobs_num", tops, "top_logprobs_num")
        if start is not None:
            assign(request, "logprob_start_len", start, "logprob_start_len")
    extra = {key: sampling[key] for key in sorted(words.sampling) if sampling.get(key) is not None}
    other_fields = {key: body[key] for key in sorted(words.fields) if body.get(key) is not None}
    return PromptRequest(rid, request, extra, other_fields, _flag(body, "return_prompt_token_ids"))


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    params = SamplingParams()
    for name, parameter in _SAMPLING.items():
        value = fields.get(name)
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        assign(params, parameter, value, f"sampling_params.{name}")
    if fields.get("n") is not None and params.n < 1:
        raise Reason.FIELD_INVALID.error("n is 0; it must be 1 or more", field="sampling_params.n")
    return params


_KINDS = {
    **dict.fromkeys(
        (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_UINT32,
            FieldDescriptor.CPPTYPE_UINT64,
        ),
        int,
    ),
    **dict.fromkeys((FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE), float),
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


def assign(message: Any, name: str, value: Any, field_: str) -> None:
    """Set a field, or raise FIELD_INVALID for ``field_``. A bool is no number, and no number is a bool."""
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    flag = descriptor.cpp_type == descriptor.CPPTYPE_BOOL
    original, value = value, of_kind(value, _KINDS.get(descriptor.cpp_type, str))
    if isinstance(value, bool) is flag:
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except (TypeError, ValueError):
            pass
        else:
            return
    raise Reason.FIELD_INVALID.error(f"{original!r} is no value of {field_}", field=field_)


def _made(kind: Any, name: str, value: Any, field_: str) -> Any:
    try:
        return kind(**{name: value})
    except (TypeError, ValueError):
        raise Reason.FIELD_INVALID.error(f"{field_} has a value that is no token id", field=field_) from None


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = of_kind(fields.get(name), bool)
    if value is not None and not isinstance(value, bool):
        raise Reason.FIELD_INVALID.error(f"{value!r} is neither true nor false", field=name)
    return bool(value)


def _unknown(
    fields: Mapping[str, Any],
    supported: frozenset[str],
    without: Mapping[str, tuple[Any, ...]],
    where: str,
    words: Words,
) -> list[str]:
    """Return the unknown fields. Raises FIELD_INVALID if ``words`` is strict, UNSUPPORTED."""
    unknown = []
    for name, value in fields.items():
        if name in supported:
            continue
        if name not in without:
            if words.strict:
                raise Reason.FIELD_INVALID.error(f"there is no field {where}{name}", field=f"{where}{name}")
            unknown.append(f"{where}{name}")
        elif not any(value is nothing for nothing in without[name]):
            raise Reason.UNSUPPORTED.error(f"{words.product} does not support {name}", field=f"{where}{name}")
    return unknown
