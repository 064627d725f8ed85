"""SGLang's native /generate, both ways, without I/O: its bodies into requests of the contract, and samples into its
replies. The gateway and the sidecar for vLLM speak it. Written from SGLang 0.5.23's ``GenerateReqInput``.
"""
