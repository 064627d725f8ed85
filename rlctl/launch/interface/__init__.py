"""The interface of launchers, and the specifications of the processes to start.

Imports: engine, contract.

Start with ``launcher.py`` (``Launcher``, ``Launched``) and ``spec.py`` (``EngineSpec``: one engine and its command
lines).
"""
