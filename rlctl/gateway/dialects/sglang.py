"""SGLang's HTTP interface, with slime's and Miles's calls: at every engine's address, and for the fleet at the root."""

from __future__ import annotations

from rlctl.gateway.dialect import Dialect
from rlctl.gateway.dialects import sglang_adapters, sglang_admin, sglang_reads, sglang_weights
from rlctl.gateway.dialects.sglang_words import refused
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.generation.service import Generation
from rlctl.gateway.openapi import served
from rlctl.gateway.table import ENGINE

ROWS = (*sglang_admin.ROWS, *sglang_reads.ROWS, *sglang_weights.ROWS, *sglang_adapters.ROWS)

GENERATING = (*routes(), *routes(ENGINE))


def dialect(generation: Generation) -> Dialect:
    """SGLang's table."""
    del generation
    table = tuple(route for row in ROWS for route in row.routes(refused))
    return Dialect("sglang", (served(ROWS, GENERATING), *GENERATING, *table), any_model=True)
