"""vLLM's control interface, as SkyRL's router has it: each control path for the fleet, and below an engine's address.

At an engine's address the answer is the server's own; at the root it is a map of those by address, with status 200 if
all are well and 207 if not. What is refused before anything was sent to any engine is an error of its own. Control
paths are :mod:`.vllm_control`, whose requests :mod:`.vllm_requests` reads; beside them :mod:`.vllm_reads`,
:mod:`.vllm_adapters`, and what generates, :mod:`.vllm_generation`.
"""

from __future__ import annotations

from rlctl.gateway import engines
from rlctl.gateway.dialect import Dialect, Route, Scope
from rlctl.gateway.dialects import vllm_adapters, vllm_control, vllm_generation, vllm_reads
from rlctl.gateway.generation.routes import routes
from rlctl.gateway.generation.service import Generation
from rlctl.gateway.table import ENGINE


def dialect(generation: Generation) -> Dialect:
    """vLLM's table."""
    del generation
    rows = [*vllm_control.ROUTES, *vllm_adapters.ROUTES, *vllm_reads.ROUTES, *vllm_generation.ROUTES]
    own = [Route("GET", "/servers", vllm_reads.servers, Scope.VIEWER)]
    return Dialect("vllm", [*own, *engines.with_engines(rows), *routes(), *routes(ENGINE)])
