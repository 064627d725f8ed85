"""The server program: launched or attached, watched, and called over HTTP within time limits.

Imports: rlctl.engine, rlctl.contract, rlctl.runtime, rlctl_servers.options.

Start with ``server.py`` (``Server``), ``process.py`` (``ServerProcess``) and ``admin_calls.py`` (``Control``).
``update_blockers.py`` refuses settings that keep or copy weights out of reach of a load.
"""
