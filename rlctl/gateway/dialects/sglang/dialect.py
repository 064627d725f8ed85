"""SGLang's HTTP interface, with calls of slime and Miles: at every engine URL, and for the fleet at the root."""

from __future__ import annotations

from rlctl.gateway.backend.service import Generation
from rlctl.gateway.dialects.sglang import adapters, admin, reads, weights
from rlctl.gateway.dialects.sglang.replies import refused
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.http.dialect import Dialect
from rlctl.gateway.http.openapi import served
from rlctl.gateway.http.table import ENGINE

ROWS = (*admin.ROWS, *reads.ROWS, *weights.ROWS, *adapters.ROWS)

GENERATING = (*routes(), *routes(ENGINE))


def dialect(generation: Generation) -> Dialect:
    del generation
    table = tuple(route for row in ROWS for route in row.routes(refused))
    return Dialect("sglang", (served(ROWS, GENERATING), *GENERATING, *table), any_model=True)
