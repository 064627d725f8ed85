"""The routes that generate: every dialect has these rows in its table."""

from __future__ import annotations

from rlctl.gateway.call import Call
from rlctl.gateway.dialect import Reply, Route, Scope


async def models(call: Call) -> Reply:
    """The models that generate, as OpenAI lists them; ``version`` is the one that is published."""
    fleet = await call.fleet.status()
    return Reply({"object": "list", "data": [_card(model) for model in fleet.models]})


def _card(model: object) -> dict[str, object]:
    name = model.name  # type: ignore[attr-defined]
    return {"id": name, "object": "model", "created": 0, "owned_by": "rlctl", "root": name, "parent": None}


ROUTES = (Route("GET", "/v1/models", models, Scope.VIEWER),)
