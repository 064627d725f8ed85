"""The vLLM server: arguments, process behind a private Unix socket, facts, memory regions.

Imports: rlctl_vllm.options, rlctl_vllm.state, rlctl_vllm.requests, rlctl_vllm.updates, rlctl_servers,
rlctl.engine, rlctl.contract.

Start with ``process.py`` (``VLLMProcess``) and ``facts.py`` (``ask``).
"""
