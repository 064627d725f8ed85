"""vLLM's HTTP API, as SkyRL and TRL use it, with SkyRL's router routes.

Imports: gateway.generation, gateway.backend, gateway.http, rollout, sglang_api, contract.

Start with ``control.py`` (``CONTROLS``: the paths that run verbs; ``control``: runs a path and answers with a map of
the engines). ``requests.py`` turns the bodies of these paths into verbs. ``generation.py`` and ``tokens.py`` have
generation on token ids, ``reads.py`` information, ``adapters.py`` LoRA; ``dialect.py`` joins the tables.
"""
