"""Generation on token ids at vLLM, one request for each sample, and probes.

Imports: rlctl_vllm.state, rlctl_servers, rlctl.engine, rlctl.contract.

Start with ``bodies.py`` (``bodies``, pure) and ``requests.py`` (``TokensInOut``).
"""
