"""The data port of SGLang: its routes, and the checks of bodies. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlctl_servers.adapters.lora_table import Held
from rlctl_servers.requests.passed_bodies import (
    Reading,
    check_bias,
    check_count,
    check_number,
    check_token_ids,
    put_salt,
    text_field,
)

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import LEAST_PENALTY
from rlctl.engine import HttpRequest, HttpRoute
from rlctl.v1.rollout_pb2 import TokenIds
from rlctl_sglang.requests.bodies import GRAMMARS, SALT, Limits

_NATIVE = ("/generate", "/encode", "/classify")
_PROMPTS = {
    **dict.fromkeys(_NATIVE, ("input_ids", "text")),
    "/v1/completions": ("prompt",),
    "/v1/chat/completions": (),
    "/v1/embeddings": ("input",),
    "/v1/classify": ("input",),
}
"""Routes with request ids, and the fields that may have several prompts."""

_MESSAGES = "/v1/messages"
_GATED = (*_PROMPTS, "/v1/score", "/v1/rerank", _MESSAGES)
_OPEN = (
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
    *("/parse_function_call", "/separate_reasoning"),
)
_READS = ("/model_info", "/get_model_info", "/v1/models", "/v1/models/{model}")

_SALTED = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Routes with a cache salt. The other routes make their own requests from a body, without a salt (0.5.23)."""

_ALONE = {"Connection": "close"}
"""Headers of streams. SGLang's task after a stream fails 2 s later if the request was refused. uvicorn then closes the
connection, even during a later request (``create_abort_task``, 0.5.23).
"""

_IDS = ("input_ids", "token_ids_logprob", "stop_token_ids", "label_token_ids")
_IDS_OR_TEXTS = ("prompt", "input", "query", "items")
_COUNTS = ("top_logprobs_num", "top_logprobs", "logprobs")

_CLOSED = {
    "background": "the answer would not be under the gate",
    "session_params": "sessions are opened by a route that is closed here",
    **dict.fromkeys(
        (
            *("input_embeds", "positional_embed_overrides", "embed_overrides", "query_embed_overrides"),
            *("item_embed_overrides", "embed_override_token_id", "multi_item_delimiter_indices"),
            "token_indices_to_pool",
        ),
        "a wrong shape or position would end the server",
    ),
    **dict.fromkeys(
        (
            *("lora_id", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "http_worker_ipc"),
            "kv_hints",
        ),
        "SGLang's own processes use it among themselves",
    ),
}
"""Fields that are not passed on, with the reason. SGLang 0.5.23."""


def routes(*, metrics: bool) -> list[HttpRoute]:
    """Return the routes of the data port. ``metrics``: SGLang was started with metrics."""
    return [
        *(HttpRoute("POST", path) for path in _GATED),
        *(HttpRoute("PUT", path) for path in _NATIVE),
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
        """Read a body. Raises FIELD_INVALID, UNSUPPORTED."""
        document = request.document
        if not isinstance(document, dict):
            return Reading()  # SGLang refuses the body
        sampling = _sampling(document)
        self._check(document, sampling)
        n = max(check_count(fields.get("n"), "n") for fields in (document, *sampling))
        reading = self._routed(request, document)
        reading.prepared = _has_grammar(document) or any(map(_has_grammar, sampling))
        if document.get("stream"):
            reading.headers |= _ALONE
        if request.path in _PROMPTS:
            self._identify(document, reading, _PROMPTS[request.path], n)
        return reading

    def read_open(self, request: HttpRequest) -> Reading:  # noqa: ARG002
        """Return nothing: SGLang takes any name of a model at its routes without the gate."""
        return Reading()

    def put_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> None:
        """Put SGLang's name of the adapter into the reading."""
        reading.fields["lora_path"] = held.name
        reading.names[held.name] = reading.adapter
        if "model" in reading.fields:
            assert isinstance(request.document, dict)
            reading.fields["model"] = f"{self._served_name}:{held.name}"
            reading.names[reading.fields["model"]] = request.document["model"]

    def put_salt(self, request: HttpRequest, reading: Reading, salt: str) -> None:
        """Put a cache salt into the reading, at routes with a salt field."""
        if request.path in _SALTED:
            put_salt(request.document, reading, SALT, salt)

    def _check(self, document: Mapping[str, Any], sampling: Iterable[Mapping[str, Any]]) -> None:
        vocab_size = self._limits.vocab_size
        for name, reason in _CLOSED.items():
            if document.get(name) not in (None, False, [], {}):
                raise Reason.UNSUPPORTED.error(f"{name} is not passed on: {reason}", field=name)
        for where, fields in (("", document), *(("sampling_params.", params) for params in sampling)):
            for name in _IDS:
                check_token_ids(fields.get(name), vocab_size, where + name)
            for name in _COUNTS:
                self._check_tops(fields.get(name), where + name)
            check_bias(fields.get("logit_bias"), vocab_size, f"{where}logit_bias")
            penalty = fields.get("repetition_penalty")
            if isinstance(penalty, float) and 0 < penalty < LEAST_PENALTY:  # SGLang itself refuses other values
                check_number(penalty, f"{where}repetition_penalty", LEAST_PENALTY, 2.0)
        for name in _IDS_OR_TEXTS:
            check_token_ids(document.get(name), vocab_size, name, texts=True)

    def _check_tops(self, value: object, name: str) -> None:
        """Raise FIELD_INVALID for a count above the vocabulary size, which would end the server."""
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, bool | None):
                check_number(number, name, -1, self._limits.vocab_size)

    def _routed(self, request: HttpRequest, document: Mapping[str, Any]) -> Reading:
        """Return the reading with the adapter: after a colon in ``model``, or ``lora_path``.

        Both are replaced, so that SGLang finds no other adapter than the gate.
        """
        fields: dict[str, Any] = {"lora_path": None} if "lora_path" in document else {}
        names: dict[str, str] = {}
        adapter = ""
        model = "" if request.path in _NATIVE else text_field(document, "model")
        if ":" in model and model != self._served_name:
            base = f"{self._served_name}:"
            adapter = (model.removeprefix(base) if model.startswith(base) else model.partition(":")[2]).strip()
            fields["model"] = self._served_name
            names[self._served_name] = model
        adapter = adapter or _one_of(document.get("lora_path"), "lora_path")
        return Reading(adapter=adapter, fields=fields, names=names)

    def _identify(self, document: Mapping[str, Any], reading: Reading, prompts: Iterable[str], n: int) -> None:
        """Put ids into the reading for an abort at SGLang.

        SGLang ends requests by the beginnings of ids. So each caller's id gets its length as a prefix: no id is then
        the beginning of a different id.
        """
        caller_rid: Any = document.get("rid")
        rids = list(caller_rid) if isinstance(caller_rid, list) else [] if caller_rid is None else [caller_rid]
        if not all(isinstance(rid_item, str) and rid_item for rid_item in rids):
            raise Reason.FIELD_INVALID.error("rid must be a text, or a list of texts", field="rid")
        count = next(
            (prompt_count for name in prompts if (prompt_count := _count(document.get(name))) is not None), None
        )
        several = count is not None
        if not rids:
            ids = [secrets.token_hex(16) for _ in range(count or 1)]
        else:
            caller_ids = (
                [f"{caller_rid}_{index}" for index in range(count or 1)] if several and len(rids) == 1 else rids
            )
            ids = [f"{len(rid)}:{rid}" for rid in caller_ids]
            reading.names.update(zip(ids, caller_ids, strict=True))
        reading.rids = rids
        reading.engine_rids = [] if n > 1 else ids  # SGLang makes the ids for several samples of a prompt
        reading.samples = n * (count or 1)
        reading.fields["rid"] = ids if several or isinstance(caller_rid, list) else ids[0]


def _count(value: object) -> int | None:
    """Return the number of prompts in a field, or None for a single prompt or no prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list | TokenIds | dict):
        return len(value)
    return None


def _one_of(value: object, name: str) -> str:
    """Return the only text of a field. Raises FIELD_INVALID, UNSUPPORTED."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str | None) for entry in values):
        raise Reason.FIELD_INVALID.error(f"{name} must be a text", field=name)
    texts = {str(entry or "") for entry in values}
    if len(texts) > 1:
        raise Reason.UNSUPPORTED.error("the prompts of one request have one adapter", field=name)
    return next(iter(texts), "")


def _sampling(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    value = document.get("sampling_params")
    return [params for params in (value if isinstance(value, list) else [value]) if isinstance(params, dict)]


def _has_grammar(fields: Mapping[str, Any]) -> bool:
    """Return whether SGLang may compile a grammar before the request begins."""
    shape, output, tools = fields.get("response_format"), fields.get("output_config"), fields.get("tools")
    shaped = isinstance(shape, dict) and shape.get("type") not in (None, "text")
    shaped |= isinstance(output, dict) and bool(output.get("format"))
    if isinstance(tools, list) and tools:
        functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
        strict = [definition.get("strict") for definition in (*tools, *functions) if isinstance(definition, dict)]
        shaped |= any(strict) or fields.get("tool_choice") not in (None, "auto", "none")
    return shaped or any(fields.get(name) for name in GRAMMARS)
