"""SGLang's HTTP interface."""

from __future__ import annotations

from rlctl.gateway.dialect import Dialect
from rlctl.gateway.generation.routes import ROUTES
from rlctl.gateway.generation.service import Generation


def dialect(generation: Generation) -> Dialect:
    """SGLang's table."""
    del generation
    return Dialect("sglang", ROUTES)
