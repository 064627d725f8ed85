"""vLLM's control interface in the form of SkyRL's router: each path for the fleet, and below each engine URL.

This module only joins the tables of routes. :mod:`.control` has the control paths (``CONTROLS``) and runs them;
:mod:`.requests` turns their bodies into verbs. The other tables are the ``ROUTES`` of :mod:`.reads`, :mod:`.adapters`
and :mod:`.generation`.

At an engine URL the response is one server's. At the root the response is a map by engine URL, with status 200 if all
engines confirmed and 207 otherwise. A request that is refused before any engine was addressed gets an error.
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
    del generation
    rows = [*control.ROUTES, *adapters.ROUTES, *reads.ROUTES, *vllm_generation.ROUTES]
    servers = [Route("GET", "/servers", reads.servers, Scope.VIEWER)]
    return Dialect("vllm", [*servers, *engine_urls.with_engines(rows), *routes(), *routes(ENGINE)])
