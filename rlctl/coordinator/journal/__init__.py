"""The durable record of the coordinator.

Decides the file format, its migrations, who may open the file, and that a damaged record stops the start
instead of being skipped. The messages are in ``protos/rlctl/v1/journal.proto``.

Imports: contract, ports, runtime.

Start with ``sqlite.py`` (``SqliteJournal.write``: one thread, grouped commits). ``start_over.py`` replaces a
journal for ``--new`` and keeps epoch and sequences.
"""
