"""vLLM's control interface, as SkyRL's router has it: each control path for the fleet, and below an engine's address.

At an engine's address the answer is the server's own; at the root it is a map of those by address, with status 200 if
all are well and 207 if not. What is refused before anything was sent to any engine is an error of its own. Control
paths are :mod:`.vllm_control`, whose requests :mod:`.vllm_requests` reads; beside them :mod:`.vllm_reads`,
:mod:`.vllm_adapters`, and what generates, :mod:`.vllm_generation`.
"""

from __future__ import annotations

from rlctl.gateway.backend.service import Generation
from rlctl.gateway.dialects.vllm import adapters, control, reads
from rlctl.gateway.dialects.vllm import generation as vllm_generation
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.http import engine_urls
from rlctl.gateway.http.dialect import Dialect, Route, Scope
from rlctl.gateway.http.table import ENGINE


def dialect(generation: Generation) -> Dialect:
    """vLLM's table."""
    del generation
    rows = [*control.ROUTES, *adapters.ROUTES, *reads.ROUTES, *vllm_generation.ROUTES]
    own = [Route("GET", "/servers", reads.servers, Scope.VIEWER)]
    return Dialect("vllm", [*own, *engine_urls.with_engines(rows), *routes(), *routes(ENGINE)])
