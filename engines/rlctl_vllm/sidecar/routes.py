"""The HTTP routes of the sidecar. Each body is parsed once, here; each answer of vLLM once, by the client."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.runtime.http_bodies import Bodies, Body
from rlctl.runtime.shielding import shielded
from rlctl.sglang_api.request import Asking
from rlctl_vllm.sidecar.admin import VERBS, Admin
from rlctl_vllm.sidecar.requests import Requests
from rlctl_vllm.sidecar.responses import wire_version
from rlctl_vllm.sidecar.supported_fields import read
from rlctl_vllm.sidecar.upstream import About, Upstream

log = logging.getLogger(__name__)

BODY_BYTES = 64 << 20
"""Most bytes of a body, as at a gateway."""

GENERATE_S = 20.0
FLUSH_LOOK_S = 0.05
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Sidecar:
    """SGLang's HTTP interface in front of a vLLM server."""

    def __init__(
        self,
        upstream: Upstream,
        about: About,
        requests: Requests,
        *,
        admin: Admin | RlctlError,
        driven: bool,
        token: str | None = None,
    ) -> None:
        """``admin``: the admin verbs, or why admin verbs are refused. ``token``: token that admin verbs require."""
        self._upstream = upstream
        self._about = about
        self._requests = requests
        self._admin = admin
        self._driven = driven
        self._token = token
        self._bodies = Bodies(BODY_BYTES)
        self._tasks: set[asyncio.Task[Any]] = set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_unlisted])
        routes = {
            "/generate": ("POST", "PUT"),
            "/health": ("GET",),
            "/health_generate": ("GET",),
            "/abort_request": ("POST",),
            "/flush_cache": ("GET", "POST"),
            "/get_weight_version": ("GET",),
            "/model_info": ("GET",),
            "/get_model_info": ("GET",),
            "/server_info": ("GET",),
            "/get_server_info": ("GET",),
            "/v1/loads": ("GET",),
        }
        for path, methods in routes.items():
            name = path.rpartition("/")[2].removeprefix("get_")
            handler: _Handler = getattr(self, f"_{name}")
            for method in methods:
                app.router.add_route(method, path, _guarded(handler))
        for verb in VERBS:
            app.router.add_post(f"/{verb}", _guarded(self._verb))
        return app

    # Requests.

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self._admin, Admin):
            self._admin.refuse_dirty()
        asking = await self._asking(request)
        if not asking.stream:
            return _json(await self._requests.whole(asking))
        answers = self._requests.streamed(asking)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            # An error of the request is an answer of its own, not an event.
            first = await anext(answers)
            await response.prepare(request)
            await response.write(_event(first))
            try:
                async for answer in answers:
                    await response.write(_event(answer))
            except RlctlError as error:
                await response.write(_event({"error": without_frames(error).described()}))
            await response.write(b"data: [DONE]\n\n")
        finally:
            await answers.aclose()
        await response.write_eof()
        return response

    async def _asking(self, request: web.Request) -> Asking:
        with contextlib.closing(Body(request, self._bodies)) as body:
            data = await body.read()
            document = await self._bodies.parse(data or b"{}")
            return await self._bodies.beside(len(data), lambda: read(document))

    async def _abort_request(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if not isinstance(body, dict) or body.keys() - {"rid", "abort_all", "abort_message"}:
            raise Reason.FIELD_INVALID.error("rid or abort_all is required", field="rid")
        rid, abort_all = body.get("rid") or "", body.get("abort_all") or False
        if not isinstance(rid, str) or not isinstance(abort_all, bool):
            raise Reason.FIELD_INVALID.error("rid is a text, abort_all is true or false", field="rid")
        aborted, unknown = await self._requests.abort([rid] if rid else [], all_of_them=abort_all)
        return _json({"success": True, "aborted": aborted, "unknown_rids": unknown})

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        del request
        loads = await self._upstream.loads()
        waiting = max(loads.waiting, self._requests.active - loads.running)
        load = {"dp_rank": 0, "num_running_reqs": loads.running, "num_waiting_reqs": waiting}
        return _json({"loads": [{**load, "num_total_reqs": loads.running + waiting}]})

    # Health.

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request
        answer = await self._upstream.ask("/health")
        return web.Response(status=200 if answer.status == 200 else 503)

    async def _health_generate(self, request: web.Request) -> web.StreamResponse:
        del request
        if isinstance(self._admin, Admin):
            self._admin.refuse_dirty()
        if await self._upstream.paused():
            raise Reason.STAGE_NOT_SERVING.error("vLLM is paused and does not generate")
        previous = self._requests.progress
        prompt = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "rid": f"HEALTH_{uuid.uuid4().hex}"}
        try:
            await asyncio.wait_for(self._requests.whole(read(prompt)), GENERATE_S)
        except TimeoutError:
            if self._requests.progress == previous:  # a busy server is healthy
                raise Reason.STAGE_NOT_SERVING.error(f"vLLM generated nothing in {GENERATE_S:g} s") from None
        return web.Response(status=200)

    # Information, and the cache.

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        timeout = request.query.get("timeout", "0")
        try:
            wait = float(timeout)
        except ValueError:
            wait = -1.0
        if not 0 <= wait <= 3600:
            raise Reason.FIELD_INVALID.error(f"{timeout!r} is no time in seconds up to an hour", field="timeout")
        if not self._about.admin:
            raise no_admin("flush_cache")
        until = asyncio.get_running_loop().time() + wait
        while not (answer := await self._upstream.ask("/reset_prefix_cache", {})).ok:
            if answer.status != 200:
                raise Reason.ENGINE_FAILED.error(f"vLLM: {answer.message}")
            if asyncio.get_running_loop().time() >= until:
                raise Reason.ACTIVE_REQUESTS.error("vLLM keeps its cache: requests hold entries of it")
            await asyncio.sleep(FLUSH_LOOK_S)
        return web.Response(text="Cache flushed.\n")

    async def _weight_version(self, request: web.Request) -> web.StreamResponse:
        del request
        return _json({"weight_version": await self._version()})

    async def _model_info(self, request: web.Request) -> web.StreamResponse:
        del request
        return _json(await self._info())

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        del request
        about = self._about
        return _json({**await self._info(), "version": about.version, "route": about.route, "status": "ready"})

    async def _info(self) -> dict[str, Any]:
        about = self._about
        return {
            "model_path": about.path,
            "served_model_name": about.model,
            "tokenizer_path": about.path if about.limits.tokenizer else None,
            "is_generation": True,
            "weight_version": await self._version(),
            "max_model_len": about.limits.context_length,
            "logprobs_mode": about.limits.logprobs_mode or None,
            "engine": "vllm",
        }

    async def _version(self) -> int | str:
        return wire_version(await self._upstream.label(), driven=self._driven)

    # Admin verbs.

    async def _verb(self, request: web.Request) -> web.StreamResponse:
        self._check_token(request)
        verb = request.path.rpartition("/")[2]
        if isinstance(self._admin, RlctlError):
            raise self._admin
        body = await self._body(request) if request.can_read_body else {}
        # A caller that disconnects does not end a change of weights half-way.
        task = asyncio.create_task(self._admin.carry_out(verb, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return _json(await shielded(task))
        except RlctlError as error:
            without_frames(error)
            return _json({"success": False, "message": str(error), "error": error.described()}, error.http_status)

    async def _body(self, request: web.Request) -> Any:
        with contextlib.closing(Body(request, self._bodies)) as body:
            return await self._bodies.parse(await body.read() or b"{}")

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Reason.TOKEN_MISSING.error()
        if not hmac.compare_digest(token.strip().encode(errors="surrogateescape"), self._token.encode()):
            raise Reason.TOKEN_INVALID.error()


def refuse_driven(coordinator: str) -> RlctlError:
    """Return the refusal of admin verbs while a coordinator drives the engine."""
    return Reason.EPOCH_REQUIRED.error(
        f"the coordinator at {coordinator} drives this vLLM",
        next_step=f"Ask it: `rlctl --endpoint {coordinator} ...`.",
    )


def no_admin(verb: str) -> RlctlError:
    """Return the refusal of a verb that needs vLLM's admin calls."""
    return Reason.UNSUPPORTED.error(
        f"this vLLM has no admin calls, which {verb} needs",
        next_step="Start vLLM with VLLM_SERVER_DEV_MODE=1 where only rlctl reaches it: admin calls need no key.",
    )


@web.middleware
async def _unlisted(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer a request without a route with a reason."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status not in (404, 405):
            raise
        failure = Reason.VERB_UNKNOWN.error(f"there is no {request.method} {request.path} here")
        failure.http_status = error.status
        response = _json({"error": failure.described()}, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _guarded(handler: _Handler) -> _Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RlctlError as error:
            response = _json({"error": without_frames(error).described()}, error.http_status)
            if error.reason is Reason.TOO_MANY_REQUESTS:
                response.headers["Retry-After"] = "1"
            return response
        except (asyncio.CancelledError, ConnectionError, web.HTTPException):
            raise
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return _json({"error": Reason.INTERNAL.error("the sidecar failed; its log says more").described()}, 500)

    return answer


def _json(value: Any, status: int = 200) -> web.Response:
    """Write JSON like Starlette: slime's router decodes and encodes a worker's answers, and keeps their length.

    orjson writes 1e-07 as 1e-7.
    """
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
