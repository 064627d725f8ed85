"""The generating routes: rows of every dialect's table."""

from __future__ import annotations

from typing import Any

from rlctl.gateway.generation.openai import chat, completions
from rlctl.gateway.generation.passthrough import passing
from rlctl.gateway.generation.sglang import generate
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.gateway.http.placeholders import PREFERRED, SLOT


def routes(prefix: str = "") -> tuple[Route, ...]:
    """Return the rows.

    ``{slot}`` in ``prefix`` requires an engine; ``{preferred}`` prefers an engine while it serves.
    """
    assert not prefix or f"{{{SLOT}}}" in prefix or f"{{{PREFERRED}}}" in prefix
    return (
        Route("POST PUT", f"{prefix}/generate", passing(generate), Scope.ROLLOUT),
        Route("POST", f"{prefix}/v1/completions", passing(completions), Scope.ROLLOUT),
        Route("POST", f"{prefix}/v1/chat/completions", passing(chat), Scope.ROLLOUT),
        Route("GET", f"{prefix}/v1/models", models, Scope.VIEWER),
        Route("GET", f"{prefix}/v1/models/{{id:.+}}", model, Scope.VIEWER),
    )


async def models(call: Call) -> Reply:
    """List the models and their adapters in OpenAI's form, with the published versions."""
    return Reply({"object": "list", "data": await _cards(call)})


async def model(call: Call) -> Reply:
    """Return one model or adapter, by any name that requests may use."""
    name = call.path["id"]
    base, adapter = await call.generation.named(name, checked=True)
    [card] = [
        card
        for card in await _cards(call)
        if (card["id"], card["parent"]) == (adapter or base, base if adapter else None)
    ]
    return Reply({**card, "id": name})


async def _cards(call: Call) -> list[dict[str, Any]]:
    common = {"object": "model", "created": 0, "owned_by": "rlctl"}
    cards: list[dict[str, Any]] = []
    for model in (await call.fleet.status()).models:
        version = {"weight_version": model.latest.label, "weight_version_seq": model.latest.sequence}
        cards.append({"id": model.name, **common, "root": model.checkpoint or model.name, "parent": None, **version})
        cards += [
            {"id": adapter.name, **common, "root": adapter.path or adapter.name, "parent": model.name, **version}
            for adapter in model.adapters
        ]
    return cards
