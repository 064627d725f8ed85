"""vLLM's routes around generation from token ids: tokenizers, and SkyRL's sessions."""

from __future__ import annotations

from rlctl.errors import Reason
from rlctl.gateway.bodies import Fields
from rlctl.gateway.call import Call
from rlctl.gateway.dialect import Reply, Route, Scope
from rlctl.gateway.dialects.vllm_tokens import generate
from rlctl.gateway.generation import sessions
from rlctl.gateway.generation.tokenizers import Tokenizer, beside


async def tokenize(call: Call) -> Reply:
    """Token ids of a text, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await _tokenizer(call, fields)
    special = fields.take("add_special_tokens", bool, True)
    tokens = await tokenizer.ids(fields.take("prompt", str), special=special)
    return Reply({"tokens": tokens, "count": len(tokens)})


async def detokenize(call: Call) -> Reply:
    """The text of token ids, by the model's tokenizer."""
    fields = await call.fields()
    tokenizer = await _tokenizer(call, fields)
    tokens = fields.take_list("tokens", int)
    return Reply({"prompt": await beside(len(tokens), lambda: tokenizer.join(tokens))})


async def _tokenizer(call: Call, fields: Fields) -> Tokenizer:
    model, _ = await call.generation.named(fields.take("model", str, ""))
    return await call.generation.tokenizers.of(model)


async def finish_session(call: Call) -> Reply:
    """The session sends nothing more."""
    session = call.query.get("session_id") or sessions.named(call, (await call.fields()).values)
    if not session:
        raise Reason.FIELD_REQUIRED.error("it is missing", field="session_id")
    await call.generation.finish_session(session)
    return Reply({"status": "ok"})


ROUTES = (
    Route("POST", "/inference/v1/generate", generate, Scope.ROLLOUT),
    Route("POST", "/tokenize", tokenize, Scope.ROLLOUT),
    Route("POST", "/detokenize", detokenize, Scope.ROLLOUT),
    Route("POST", "/finish_session", finish_session, Scope.ROLLOUT),
)
