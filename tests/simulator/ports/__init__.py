"""The simulated ports: virtual time and processes, network, journal, process groups, shared memory.

Imports: rlctl.ports, rlctl.contract, rlctl.runtime.

Start with ``virtual_time.py`` (``World``, ``Node``: a process that can be killed or stopped) and
``network.py``.
"""
