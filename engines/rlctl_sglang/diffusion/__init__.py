"""SGLang-Diffusion servers: images and videos, attached to as stages that take weights from disk.

Imports: rlctl_sglang.server, rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``engine.py`` (``DiffusionEngine``), ``server.py`` (``Server``) and ``modules.py`` (``Pipelines``).
"""
