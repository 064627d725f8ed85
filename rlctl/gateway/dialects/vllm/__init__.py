"""vLLM's HTTP API, as SkyRL and TRL use it, with SkyRL's router routes.

Imports: gateway.generation, gateway.backend, gateway.http, rollout, sglang_api, contract.

Start with ``dialect.py``. ``control.py`` (``control``) sends one verb to each engine and answers with a map;
``requests.py`` has the admin routes, ``tokens.py`` generation on token ids.
"""
