"""Code inside the ranks of an engine server: which weights a rank stores, and where.

``element_layout.py`` (``find_layout``) loads coded tensors through the engine's loaders and reads from the parameters
which element of which checkpoint tensor lies where.

Imports: rlctl.contract, rlctl.weights. No HTTP, no gRPC, no engine.

Start with ``element_layout.py``, then ``element_codes.py`` and ``element_regions.py``.
"""
