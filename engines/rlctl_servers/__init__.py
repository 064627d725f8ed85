"""What the plug-ins for engine servers share: SGLang's and vLLM's are programs of their own, driven over HTTP.

:mod:`rlctl_servers.process` launches one, :mod:`rlctl_servers.server` watches it, :mod:`rlctl_servers.http` and
:mod:`rlctl_servers.control` call it, :mod:`rlctl_servers.generation` runs requests at it, and
:mod:`rlctl_servers.checkpoints` looks at what it is told to load.
"""
