"""vLLM's control interface, as SkyRL's router has it: each control path for the fleet, and below an engine's address.

This module only joins the tables of routes. :mod:`.control` has the control paths (``CONTROLS``) and runs them;
:mod:`.requests` turns their bodies into verbs. The other tables are the ``ROUTES`` of :mod:`.reads`,
:mod:`.adapters` and :mod:`.generation`.

At an engine's address the answer is that of one server. At the root it is a map of the answers by address, with
status 200 if all servers confirmed and 207 otherwise. A request that is refused before any engine was addressed is
answered with an error.
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
