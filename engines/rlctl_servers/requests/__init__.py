"""Generation at a server: one stream for each sample, limits checked before anything is sent, probes.

Imports: rlctl_servers.server, rlctl.engine, rlctl.contract.

Start with ``requests.py`` (``Requests``) and ``limits.py``. ``running.py`` ends requests. ``cache_salts.py`` keeps KV
entries of different versions apart.
"""
