"""HTTP server in front of a fleet. The gateway keeps no state of the fleet: coordinator and stages decide.

Stages are picked by ``Router.pick`` in ``rlctl/rollout/picking/router.py``; the package router is sglang-router.
Requests to engines with a data port are forwarded (``generation/passthrough.py``). Requests to other engines are
translated.

``server.py`` listens, runs one dialect and drains at its end; ``prefork.py`` shares one port between processes.
Packages, from bottom to top: backend, http, generation, dialects; router and radix are options in front.

Imports: sdk, rollout, sglang_api, contract, ports, runtime, transport.

Start with ``http/dialect.py`` (``Dialect``, ``Route``), then ``dialects/slime/dialect.py``, the smallest dialect.
"""
