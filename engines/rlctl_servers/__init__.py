"""What the plug-ins for engine servers share: SGLang's and vLLM's are programs of their own, driven over HTTP.

:mod:`rlctl_servers.server.process` launches one, :mod:`rlctl_servers.server.server` watches it,
:mod:`rlctl_servers.server.http` and :mod:`rlctl_servers.server.admin_calls` call it,
:mod:`rlctl_servers.requests.requests` runs requests at it, and :mod:`rlctl_servers.updates.checkpoints` looks at what
it is told to load.
"""
