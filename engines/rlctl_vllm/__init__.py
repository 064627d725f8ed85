"""A real vLLM server as an engine of rlctl: launched by the stage server, or attached to, and driven over HTTP.

:class:`rlctl_vllm.engine.VLLMEngine` is the port; see :mod:`rlctl_vllm.server.process` for launching,
:mod:`rlctl_servers` for calls, :mod:`rlctl_vllm.state` for what vLLM may be told when,
:mod:`rlctl_vllm.requests.bodies` and :mod:`rlctl_vllm.requests.requests` for requests,
:mod:`rlctl_vllm.updates.updates` for weights. Inside of vLLM's workers run :mod:`rlctl_vllm.worker.extension` and what
it imports (``rank``, ``model``); :mod:`rlctl_vllm.updates.worker_calls` calls them. Nothing is imported here: a worker
needs no HTTP client.
"""
