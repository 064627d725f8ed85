"""What a launcher must do, and what it starts.

Imports: engine, contract.

Start with ``launcher.py`` (``Launcher``, ``Launched``) and ``spec.py`` (``EngineSpec``: one engine and its
command lines).
"""
