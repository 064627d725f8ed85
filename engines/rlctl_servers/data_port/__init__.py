"""The engine's part of the data port: requests that are passed on to a server as they came.

Decides whether a request may be sent, translates names of models and adapters, and sets the labels of versions in an
answer. The ``Reader`` of each kind of server reads the body.

Imports: rlctl_servers.adapters, rlctl_servers.requests, rlctl_servers.server, rlctl_servers.updates, rlctl.engine,
rlctl.runtime, rlctl.contract.

Start with ``passing.py`` (``Passing.read``; ``_Exchange.begin`` sends the request). ``answers.py`` puts rlctl's
labels of versions into answers.
"""
