"""SGLang's ``/generate`` in both directions, without I/O: bodies to requests, samples to replies.

Decides which fields of SGLang are supported, and how a sample becomes a reply in SGLang's form. The gateway and the
sidecar for vLLM use this package.

Imports: contract.

Start with ``request.py`` (``read``) and ``response.py`` (``Reply``). Written from SGLang 0.5.23.
"""
