"""Code inside vLLM's workers: groups, segments, loading, reading back, digests.

Imports: rlctl.contract, rlctl.weights. No HTTP, no gRPC.

Start with ``extension.py`` (``WorkerExtension``), ``rank.py`` (``Rank``: the steps of an update) and
``model.py`` (``VLLMModel``: write through vLLM's loaders, read back).
"""
