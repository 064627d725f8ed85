"""vLLM's routes around generation from token ids: tokenizers, and SkyRL's sessions."""

from __future__ import annotations

import uuid

from rlctl.contract.errors import Reason
from rlctl.gateway.backend.tokenizers import Tokenizer, beside
from rlctl.gateway.dialects.vllm import tokens as vllm_tokens
from rlctl.gateway.generation import openai, sessions
from rlctl.gateway.generation.passthrough import passing
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.v1.rollout_pb2 import TokenIds


async def tokenize(call: Call) -> Reply:
    """Return the token ids of a text, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await _tokenizer(call, fields)
    special = fields.take("add_special_tokens", bool, True)
    tokens = await tokenizer.ids(fields.take("prompt", str), special=special)
    return Reply({"tokens": tokens, "count": len(tokens)})


async def detokenize(call: Call) -> Reply:
    """Return the text of token ids, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await _tokenizer(call, fields)
    value = fields.take("tokens", object)
    tokens = list(value.ids) if isinstance(value, TokenIds) else fields.take_list("tokens", int)
    return Reply({"prompt": await beside(len(tokens), lambda: tokenizer.join(tokens))})


async def _tokenizer(call: Call, fields: Fields) -> Tokenizer:
    model, _ = await call.generation.named(fields.take("model", str, ""))
    return await call.generation.tokenizers.of(model)


async def render(call: Call) -> Reply:
    """Return a chat's token ids, by the model's template, and sampling parameters, for /inference/v1/generate."""
    fields = await call.fields()
    name = fields.take("model", str, "")
    model, _ = await call.generation.named(name)
    fields.accept("stream", "stream_options", "cache_salt", "priority", *sessions.FIELDS)
    return Reply(
        {
            "request_id": fields.take("request_id", str, "") or f"chatcmpl-{uuid.uuid4().hex}",
            "token_ids": await openai.render(call, fields, model),
            "features": None,
            "sampling_params": vllm_tokens.sampling_of_chat(fields),
            "model": name or model,
            "stream": fields.take("stream", bool, False),
            "stream_options": fields.values.get("stream_options"),
            "cache_salt": fields.values.get("cache_salt"),
            "priority": fields.take("priority", int, 0),
            "kv_transfer_params": None,
        }
    )


async def generate_routed(call: Call) -> Reply:
    """Refuse SkyRL's generation with routed experts: not supported."""
    await call.fields()
    raise Reason.UNSUPPORTED.error(
        "no engine here returns routed experts",
        field="routed_experts",
        next_step="Turn enable_return_routed_experts off: SkyRL's client then uses /inference/v1/generate.",
    )


async def finish_session(call: Call) -> Reply:
    """End a session."""
    session = call.query.get("session_id") or sessions.named(call, (await call.fields()).values)
    if not session:
        raise Reason.FIELD_REQUIRED.error("session_id is required", field="session_id")
    await call.generation.finish_session(session)
    return Reply({"status": "ok"})


ROUTES = (
    Route("POST", "/inference/v1/generate", passing(vllm_tokens.generate), Scope.ROLLOUT),
    Route("POST", "/skyrl/v1/generate", generate_routed, Scope.ROLLOUT),
    Route("POST", "/v1/chat/completions/render", passing(render), Scope.ROLLOUT),
    Route("POST", "/tokenize", passing(tokenize), Scope.ROLLOUT),
    Route("POST", "/detokenize", passing(detokenize), Scope.ROLLOUT),
    Route("POST", "/finish_session", finish_session, Scope.ROLLOUT),
)
