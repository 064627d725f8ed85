"""Processes on this machine: children that end with the parent, with GPUs, cores and logs.

Imports: launch.interface, engine, contract, runtime, transport.

Start with ``launcher.py`` (``LocalLauncher``) and ``child_processes.py`` (``Process``).
"""
