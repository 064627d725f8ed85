"""Generation in SGLang's native format, one request for each sample, and probes.

Imports: rlctl_sglang.state, rlctl_servers, rlctl.engine, rlctl.contract.

Start with ``bodies.py`` (``bodies``, pure) and ``requests.py`` (``Native``).
"""
