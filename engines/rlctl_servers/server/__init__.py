"""The server program: started or attached to, watched, called over HTTP within a time limit.

Imports: rlctl.engine, rlctl.contract, rlctl.runtime, rlctl_servers.options.

Start with ``server.py`` (``Server``), ``process.py`` (``ServerProcess``) and ``admin_calls.py`` (``Control``).
``update_blockers.py`` refuses settings that keep or copy weights where a load does not reach.
"""
