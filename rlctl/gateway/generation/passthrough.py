"""Forwards requests to the data ports of stages, instead of translating.

Body and response stay the same, byte for byte. The gateway reads only the fields that select a stage.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import orjson
from multidict import CIMultiDict

from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.gateway.backend import generation_spans
from rlctl.gateway.backend.data_ports import Exchange, lists
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.generation import sessions
from rlctl.gateway.generation.samples import place_of
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Handler, Reply, Route, Scope, Stream
from rlctl.gateway.http.placeholders import PREFERRED, SLOT
from rlctl.rollout.rollout import Place
from rlctl.runtime.http_errors import body_of
from rlctl.runtime.http_forwarding import MIN_VERSION, WAIT, end_to_end, min_version
from rlctl.transport.auth import ON_BEHALF_OF
from rlctl.transport.channel import bearer

WHOLE_BYTES = 1 << 20
"""Largest JSON response that is read whole before it is sent, so that a further stage can take over."""

_EVENT_BYTES = 16 << 10
"""Bytes at the end of a stream that are searched for the stage's own error event."""

_OWN = frozenset(
    {"host", "content-length", "content-encoding", "expect", MIN_VERSION.lower(), WAIT.lower(), ON_BEHALF_OF}
)
"""Request headers that the gateway writes itself. Received bodies are decompressed."""

_PREFIX = re.compile(r"/(engines|routed)/([^/?]+)(/.*)")


@dataclass(frozen=True)
class _Request:
    """A request to forward.

    Attributes:
        target: path and query as received, without the prefix that names a stage.
        rid: id for an abort by the caller.
    """

    target: str
    headers: CIMultiDict[str]
    model: str
    adapter: str
    session: str
    min_version: int
    rid: str
    place: Place


@dataclass(frozen=True)
class _Head:
    """The head of a response. ``whole``: the next piece is the entire body."""

    status: int
    headers: CIMultiDict[str]
    whole: bool


def passing(handler: Handler) -> Handler:
    """Forward requests if every stage of the model has the route at its data port.

    The handler translates the other requests, and all requests of a gateway with resume="continue".
    """

    @functools.wraps(handler)
    async def answer(call: Call) -> Answer:
        if call.generation.settings.resume == "return" and await _passes(call.generation, call.method, _path(call)):
            request = await _read(call)
            if request is not None:
                return await _forward(call, request)
        return await handler(call)

    return answer


async def unlisted(generation: Generation, method: str, url: str) -> Route | None:
    """Return a route for a path outside the dialect, if the data ports of a model's stages have the path."""
    prefixed = _PREFIX.fullmatch(url)
    path = (prefixed[3] if prefixed else url).partition("?")[0]
    if method != "POST" or not await _passes(generation, method, path):
        return None
    path_parameters = {SLOT if prefixed[1] == "engines" else PREFERRED: unquote(prefixed[2])} if prefixed else {}

    async def forward(call: Call) -> Answer:
        """Forward to a stage."""
        call.path = path_parameters
        request = await _read(call)
        if request is None:
            failure = Reason.VERB_UNKNOWN.error(f"not every stage of the model has {method} {path}")
            failure.http_status = 404
            raise failure
        return await _forward(call, request)

    return Route(method, path, forward, Scope.ROLLOUT)


async def _passes(generation: Generation, method: str, path: str) -> bool:
    """Return whether the requests of at least one model are forwarded."""
    models = await generation.fleet.models()
    return any(lists(generation.rollout(model.name).data_routes, method, path) for model in models)


async def _read(call: Call) -> _Request | None:
    """Read the fields that select a stage. Return None if the model does not have the route.

    Raises FIELD_INVALID, MODEL_NOT_FOUND, STAGE_NOT_FOUND, and as :meth:`Call.json`.
    """
    body = {} if call.headers.get("Content-Type", "").lower().startswith("multipart/") else await call.json()
    fields = body if isinstance(body, dict) else {}
    model, adapter = await _model(call, fields)
    if not lists(call.generation.rollout(model).data_routes, call.method, _path(call)):
        return None
    return _Request(
        target=_target(call),
        headers=CIMultiDict(end_to_end(call.headers, _OWN)),
        model=model,
        adapter=adapter,
        session=sessions.named(call, fields),
        min_version=min_version(call.headers),
        rid=_text(fields.get("rid")) or _text(fields.get("request_id")),
        place=await place_of(call),
    )


async def _model(call: Call, fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return model and adapter of a body, in SGLang's or OpenAI's fields. The stage refuses values of other types."""
    name, path = _text(fields.get("model")), fields.get("lora_path")
    paths = path if isinstance(path, list) else [path]
    adapter = next((each for each in paths if each and isinstance(each, str)), "")
    if _path(call) == "/generate":
        return await call.generation.model(name), adapter
    model, model_adapter = await call.generation.named(name)
    return model, model_adapter or adapter


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _target(call: Call) -> str:
    prefixed = _PREFIX.fullmatch(call.url) if SLOT in call.path or PREFERRED in call.path else None
    return prefixed[3] if prefixed else call.url


def _path(call: Call) -> str:
    return _target(call).partition("?")[0]


async def _forward(call: Call, request: _Request) -> Answer:
    """Return a stage's response. Raises the refusal of all stages, TOO_MANY_REQUESTS and QUOTA_EXCEEDED."""
    pieces = _pieces(call, request)
    head = cast(_Head, await anext(pieces))
    body = cast(AsyncGenerator[bytes, None], pieces)
    if not head.whole:
        return Stream(body, None, head.headers, content_type="", status=head.status)
    async with contextlib.aclosing(body):
        head.headers.popall("Content-Length", None)
        return Reply(await anext(body), head.status, head.headers)


async def _pieces(call: Call, request: _Request) -> AsyncGenerator[_Head | bytes, None]:
    """Yield the head of the response, then its body. Closing ends the request at the engine.

    A further stage is tried only before the head.
    """
    generation, body = call.generation, await call.take_body()
    forwarded = generation.rollout(request.model).forwarding(
        adapter=request.adapter,
        rid=request.rid,
        session_id=request.session,
        min_version=request.min_version,
        timeout_s=generation.settings.timeout_s,
        credentials=call.credentials,
        place=request.place,
    )
    spanned = generation_spans.generating(generation.tracer, request.model)
    with generation.quotas.places(), generation.under_way(len(body)), spanned as span, forwarded as forwarding:
        while (attempt := await forwarding.attempt()) is not None:
            with attempt, contextlib.closing(generation.ports.at(attempt)) as exchange:
                headers = CIMultiDict(request.headers)
                headers.update({MIN_VERSION: str(attempt.floor), WAIT: "0", **dict(bearer(call.credentials))})
                headers.update(generation_spans.headers(span))
                try:
                    await exchange.begin(call.method, request.target, headers, body, forwarding.deadline)
                    first, whole = await _beginning(exchange, forwarding.deadline)
                except RlctlError as failure:
                    if not forwarding.again(attempt, without_frames(failure)):
                        raise
                    continue
                attempt.answered()
                if span is not None:
                    generation_spans.note_forwarded(span, attempt.stage, exchange.status, exchange.headers)
                body = b""
                yield _Head(exchange.status, exchange.headers, whole)
                yield first
                if not whole:
                    async for piece in _rest(exchange, first):
                        yield piece
                return
    aborted = Reason.CANCELLED.error("the request was aborted before a stage accepted it", field="rid")
    aborted.http_status = 400  # OpenAI's client repeats a 409
    raise aborted


async def _beginning(exchange: Exchange, deadline: float) -> tuple[bytes, bool]:
    """Return the first bytes of a response, and whether the body is complete. A small JSON document is read whole."""
    document = _has_type(exchange, "application/json")
    pieces: list[bytes] = []
    size = 0
    while piece := await exchange.read(deadline):
        pieces.append(piece)
        size += len(piece)
        if not document or size > WHOLE_BYTES:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def _rest(exchange: Exchange, first: bytes) -> AsyncGenerator[bytes, None]:
    """Yield the remaining bytes. Raises RlctlError if the stage breaks off; its last event is then an error."""
    end = first[-_EVENT_BYTES:]
    try:
        while piece := await exchange.read():
            end = (end + piece)[-_EVENT_BYTES:]
            yield piece
    except RlctlError as error:
        events = _has_type(exchange, "text/event-stream") and "Content-Encoding" not in exchange.headers
        if events and b'data: {"error"' not in end.rstrip().rpartition(b"\n\n")[2]:
            yield b"%sdata: %s\n\n" % (b"" if end.endswith(b"\n\n") else b"\n\n", orjson.dumps(body_of(error)))
        raise


def _has_type(exchange: Exchange, content_type: str) -> bool:
    return exchange.headers.get("Content-Type", "").lower().startswith(content_type)
