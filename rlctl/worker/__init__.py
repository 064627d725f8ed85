"""A rank: runs admin commands on its engine, one mutating verb at a time, with one result for each command.

Decides the order of commands at a rank, and the typed result of every failure.

Imports: command_stream, contract, engine, ports; ``server.py`` also transport.

Start with ``worker.py`` (``Worker.carry_out``), used inside the stage server for rank 0. ``follower.py`` and
``server.py`` are the process of every other rank.
"""
