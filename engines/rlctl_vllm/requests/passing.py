"""The data port of vLLM: its routes, and the checks of bodies. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.requests.passed_bodies import Reading, check_count, check_token_ids, put_salt, text_field

from rlctl.contract.errors import Reason
from rlctl.engine import HttpRequest, HttpRoute
from rlctl_vllm.requests.bodies import MOST_SALT, SALT, Limits

_IDS = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/inference/v1/generate": "generate-tokens-",
}
"""Prefix that vLLM puts before the id of a generation request, by route."""

_GATED = (
    *_IDS,
    *("/v1/messages", "/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"),
    *("/v2/rerank", "/v2/embed", "/generative_scoring"),
)
_OPEN = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    *("/v1/completions/render", "/v1/chat/completions/render"),
)
_READS = ("/v1/models", "/version", "/metrics")

_SALTED = frozenset(_GATED) - {"/v2/embed"}
"""Routes that take a cache salt."""

_CLOSED = {"kv_transfer_params": "it is between the servers of a pair"}
_COUNTS = ("n", "best_of")
_PROMPTS = ("prompt", "token_ids", "input")
_HEADER = "X-Request-Id"
DEFAULT = "default"
"""Model name of clients without a name."""


def routes() -> list[HttpRoute]:
    return [
        *(HttpRoute("POST", path) for path in _GATED),
        *(HttpRoute("POST", path, gated=False) for path in _OPEN),
        *(HttpRoute("GET", path, gated=False) for path in _READS),
    ]


class Reader:
    """Reader of requests at the data port; see :class:`rlctl_servers.data_port.passing.Reader`."""

    def __init__(
        self, limits: Limits, served_name: str, checkpoints: Callable[[], Collection[str]], adapters: LoraTable
    ) -> None:
        """``served_name``: vLLM's name of its model. ``checkpoints``: paths that name the model, too."""
        self._limits = limits
        self._served_name = served_name
        self._checkpoints = checkpoints
        self._adapters = adapters

    def read(self, request: HttpRequest) -> Reading:
        """Read the body of a request. Raises FIELD_INVALID, UNSUPPORTED."""
        document = request.document
        if not isinstance(document, dict):
            return Reading()  # vLLM refuses this body
        for name, reason in _CLOSED.items():
            if document.get(name):
                raise Reason.UNSUPPORTED.error(f"{name} is not passed on: {reason}", field=name)
        sampling = document.get("sampling_params")
        objects = (document, sampling if isinstance(sampling, dict) else {})
        samples = max(check_count(fields.get(name), name) for fields in objects for name in _COUNTS)
        self._check_prompt_logprobs(objects)
        if not self._limits.tokenizer:  # with a tokenizer vLLM checks the ids
            for name in _PROMPTS:
                check_token_ids(document.get(name), self._limits.vocab_size, name, texts=True)
        reading = self._named(text_field(document, "model"))
        reading.samples = samples
        if request.path in _IDS:
            self._identify(request, document, reading)
        return reading

    def read_open(self, request: HttpRequest) -> Reading:
        """Read the model's name in the body of a request at a route without the gate."""
        document = request.document
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, str):
            return Reading()  # vLLM refuses other types
        reading = self._named(model)
        if (held := self._adapters.by_name.get(reading.adapter)) is not None:
            self.put_adapter(request, reading, held)
        return reading

    def put_adapter(self, request: HttpRequest, reading: Reading, held: Held) -> None:
        """Put vLLM's name of the adapter into the reading."""
        assert isinstance(request.document, dict)
        reading.fields["model"] = held.name
        reading.names[held.name] = text_field(request.document, "model")

    def put_salt(self, request: HttpRequest, reading: Reading, salt: str) -> None:
        """Put a cache salt into the reading, at routes that take a salt."""
        if request.path in _SALTED:
            put_salt(request.document, reading, SALT, salt, MOST_SALT)

    def _check_prompt_logprobs(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Raise UNSUPPORTED if log probabilities of the prompt are requested and would end the server.

        With ``echo``, vLLM computes those of the prompt wherever it computes those of the output, and in every chat.
        """
        for fields in objects:
            for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
                if fields.get(name) is not None:
                    self._limits.refuse_prompt_logprobs(name)
            if fields.get("echo") and (fields.get("logprobs") is not None or "messages" in fields):
                self._limits.refuse_prompt_logprobs("echo")

    def _named(self, model: str) -> Reading:
        """Resolve a model name. A loaded adapter has priority, also as "MODEL:ADAPTER"."""
        suffix = model.partition(":")[2]
        adapter = next((name for name in (model, suffix) if name and name in self._adapters.by_name), "")
        if adapter:
            return Reading(adapter=adapter)
        if not model or model == self._served_name:
            return Reading()
        served = model == DEFAULT or model in self._checkpoints()
        fields, names = {"model": self._served_name}, {self._served_name: model}
        return Reading(model="" if served else model, fields=fields, names=names)

    def _identify(self, request: HttpRequest, document: Mapping[str, Any], reading: Reading) -> None:
        """Put the ids into the reading by which vLLM can end the request."""
        header_rid = next((value for name, value in request.headers if name.lower() == _HEADER.lower()), "")
        body_rid = text_field(document, "request_id")
        rid = header_rid or body_rid or secrets.token_hex(16)
        if header_rid or not body_rid:
            reading.headers[_HEADER] = rid
        engine_rid = _IDS[request.path] + rid
        reading.engine_rids = [engine_rid]
        if request.path == "/v1/completions":
            prompt = document.get("prompt")
            prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
            reading.engine_rids = [f"{engine_rid}-{index}" for index in range(prompts)]
        reading.samples *= len(reading.engine_rids)
        reading.rids = [body_rid] if body_rid else []
