"""Code inside vLLM's workers: rlctl's ranks over vLLM's model.

Imports: rlctl_servers.ranks, rlctl.contract, rlctl.weights. No HTTP, no gRPC.

Start with ``extension.py`` (``WorkerExtension``), then ``model.py`` (``VLLMModel``: write through vLLM's loaders, read
back). The steps of an update are in ``rlctl_servers.ranks``.
"""
