"""Requests at the data port of SGLang: which routes it passes on, and what it reads of their bodies. Pure."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from rlctl_servers.adapters.lora_table import Held
from rlctl_servers.requests.passed_bodies import Reading, check_count, check_token_ids, text_field

from rlctl.contract.errors import Reason
from rlctl.engine import HttpRequest, HttpRoute
from rlctl_sglang.requests.bodies import GRAMMARS, Limits

_WITH_ID = (
    *("/generate", "/encode", "/classify", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
    "/v1/classify",
)
_GATED = (*_WITH_ID, "/v1/score", "/v1/rerank", "/v1/messages")
_OPEN = (
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
    *("/parse_function_call", "/separate_reasoning"),
)
_READS = ("/model_info", "/get_model_info", "/v1/models", "/v1/models/{model}")

_NATIVE = ("/generate", "/encode", "/classify")
_PUT = _NATIVE
"""SGLang takes them by PUT, too."""

_IDS = ("input_ids", "prompt", "token_ids_logprob", "stop_token_ids", "input")
_COUNTS = ("top_logprobs_num", "top_logprobs", "logprobs")

_CLOSED = {
    "background": "the answer would not be under the gate",
    "session_params": "sessions are opened by a route that is closed here",
    **dict.fromkeys(
        ("input_embeds", "positional_embed_overrides", "embed_overrides"), "a wrong shape would end the server"
    ),
    **dict.fromkeys(
        ("lora_id", "need_wait_for_mm_inputs", "num_items_assigned", "token_indices_to_pool", "encoder_urls"),
        "SGLang's own processes use it among themselves",
    ),
}
"""Fields that are not passed on, and why. SGLang 0.5.23."""


def routes(*, metrics: bool) -> list[HttpRoute]:
    """The routes of the data port; ``metrics``: SGLang was started with its own."""
    return [
        *(HttpRoute("POST", path) for path in _GATED),
        *(HttpRoute("PUT", path) for path in _PUT),
        *(HttpRoute("POST", path, gated=False) for path in _OPEN),
        *(HttpRoute("GET", path, gated=False) for path in (*_READS, *["/metrics"] * metrics)),
    ]


class Reader:
    """See :class:`rlctl_servers.data_port.passing.Reader`."""

    def __init__(self, limits: Limits, served_name: str) -> None:
        """``served_name``: SGLang's name of its model."""
        self._limits = limits
        self._served_name = served_name

    def read(self, request: HttpRequest) -> Reading:
        """What a body says. Raises FIELD_INVALID, UNSUPPORTED."""
        document = request.document
        if not isinstance(document, dict):
            return Reading()  # which SGLang refuses
        self._check(document)
        sampling = _sampling(document)
        counts = [document.get("n"), *(each.get("n") for each in sampling)]
        for count in counts:
            check_count(count, "n")
        adapter = self._adapter(document, native=request.path in _NATIVE)
        prepared = _has_grammar(document) or any(_has_grammar(each) for each in sampling)
        if request.path not in _WITH_ID:
            return Reading(adapter=adapter, prepared=prepared)
        rids, fields = _ids(document), {}
        engine_rids = rids
        if not rids:
            engine_rids = [uuid.uuid4().hex]
            fields["rid"] = engine_rids[0]
        if any((count or 1) > 1 for count in counts):
            engine_rids = []  # SGLang gives its samples ids of their own
        return Reading(rids, engine_rids, adapter, prepared=prepared, fields=fields)

    def with_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> Reading:
        """The same with SGLang's name of the adapter."""
        document = request.document
        assert isinstance(document, dict)
        fields = {**reading.fields, "lora_path": held.name}
        model = document.get("model")
        if request.path in _NATIVE or not isinstance(model, str):
            return dataclasses.replace(reading, fields=fields, names={held.name: reading.adapter})
        # SGLang takes what comes after a colon for the adapter, before ``lora_path``.
        sent = fields["model"] = f"{self._served_name}:{held.name}"
        return dataclasses.replace(reading, fields=fields, names={sent: model, held.name: reading.adapter})

    def _check(self, document: Mapping[str, Any]) -> None:
        for name, why in _CLOSED.items():
            if document.get(name) not in (None, False, [], {}):
                raise Reason.UNSUPPORTED.error(f"{name} is not passed on: {why}", field=name)
        for where, fields in (("", document), *(("sampling_params.", each) for each in _sampling(document))):
            for name in _IDS:
                check_token_ids(fields.get(name), self._limits.vocab_size, where + name)
            for name in _COUNTS:
                self._check_tops(fields.get(name), where + name)
            self._check_bias(fields.get("logit_bias"), f"{where}logit_bias")

    def _check_tops(self, value: object, name: str) -> None:
        """More than the vocabulary has end the server."""
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool | None):
                continue
            if type(each) is not int or not -1 <= each <= self._limits.vocab_size:
                raise Reason.FIELD_INVALID.error(
                    f"{name} is {each}; it must be a number up to {self._limits.vocab_size}", field=name
                )

    def _check_bias(self, value: object, name: str) -> None:
        if value is None:
            return
        known = isinstance(value, dict) and all(
            isinstance(token, str) and token.isascii() and token.isdigit() and int(token) < self._limits.vocab_size
            for token in value
        )
        if not known:
            raise Reason.FIELD_INVALID.error(
                f"{name} is an object by token ids below {self._limits.vocab_size}", field=name
            )

    def _adapter(self, document: Mapping[str, Any], *, native: bool) -> str:
        """rlctl's name of the adapter: after a colon in ``model``, or ``lora_path``."""
        model = "" if native else text_field(document, "model")
        if ":" in model and model != self._served_name:
            base = f"{self._served_name}:"
            return (model.removeprefix(base) if model.startswith(base) else model.partition(":")[2]).strip()
        paths = document.get("lora_path")
        named: Collection[object] = {*paths} if isinstance(paths, list) else {paths}
        if len(named) > 1:
            raise Reason.UNSUPPORTED.error("the prompts of one request have one adapter", field="lora_path")
        [path] = named or [None]
        return text_field({"lora_path": path}, "lora_path")


def _sampling(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = document.get("sampling_params")
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def _has_grammar(fields: Mapping[str, Any]) -> bool:
    """Whether SGLang may compile something before it begins with the request."""
    shape, tools = fields.get("response_format"), fields.get("tools") or ()
    shaped = isinstance(shape, dict) and shape.get("type") not in (None, "text")
    called = bool(tools) and fields.get("tool_choice") not in (None, "auto", "none")
    strict = any(isinstance(tool, dict) and (tool.get("function") or {}).get("strict") for tool in tools)
    return shaped or called or strict or any(fields.get(name) for name in GRAMMARS)


def _ids(document: Mapping[str, Any]) -> list[str]:
    given: Any = document.get("rid")
    rids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(each, str) and each for each in rids):
        raise Reason.FIELD_INVALID.error("rid must be a text, or a list of texts", field="rid")
    return rids
