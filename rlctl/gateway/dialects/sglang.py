"""SGLang's HTTP interface."""

from __future__ import annotations

from rlctl.gateway.dialect import Dialect
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.generation.service import Generation


def dialect(generation: Generation) -> Dialect:
    """SGLang's table."""
    del generation
    return Dialect("sglang", routes())
