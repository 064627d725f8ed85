"""The public SDK: ``connect`` for blocking code, ``aio.connect`` for asyncio.

Decides the public names only: each method forwards to client, rollout or trainer.

Imports: client, rollout, trainer, contract, engine, ports, runtime, transport.

Start with ``aio.py`` (``AsyncFleet``). ``blocking.py`` runs the same methods on a background loop; ``sglang_names.py``
has the method names of SGLang's Python API.
"""
