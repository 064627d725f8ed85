"""SGLang's HTTP API, also used by Miles and slime.

Imports: gateway.generation, gateway.backend, gateway.http, contract, runtime.

Start with ``dialect.py`` (``dialect``: all rows). ``weights.py`` has updates and groups, ``admin.py`` pauses,
caches and memory, ``adapters.py`` LoRA, ``reads.py`` information, ``replies.py`` the form of answers.
"""
