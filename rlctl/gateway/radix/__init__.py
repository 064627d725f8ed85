"""The radix middleware: token ids of earlier conversations, found by text or by ids.

Decides which trajectory continues a prompt, and which trajectories are evicted.

Imports: gateway.backend, gateway.http, contract.

Start with ``middleware.py`` (``RadixMiddleware``), ``trajectories.py`` and ``tree.py`` (``RadixTree.longest``).
"""
