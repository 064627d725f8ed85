"""``rlctl sidecar vllm``: SGLang's HTTP interface in front of one vLLM server, without a coordinator.

Imports: rlctl_vllm, rlctl_servers, rlctl.sglang_api, rlctl.engine, rlctl.contract, rlctl.runtime.

Start with ``routes.py`` (``Sidecar``), ``server.py`` (``SidecarServer``) and ``admin.py`` (``Admin``: one
update at a time).
"""
