"""The durable record of the coordinator.

Decides the file format, its migrations and the lock of the file. A damaged record stops the start of the coordinator
and is never skipped. The messages are in ``protos/rlctl/v1/journal.proto``.

Imports: contract, ports, runtime.

Start with ``sqlite.py`` (``SqliteJournal.write``: one thread, grouped commits). ``start_over.py`` replaces a journal
for ``--new`` and keeps epoch and sequences. ``files.py`` copies and replaces files that no coordinator has open;
``coordinator/maintenance.py`` decides which of these files are sound.

The record of an update is written by ``coordinator/updates/manager.py`` (``Updates.begin``), and by
``coordinator/transaction/transaction.py`` (``Session.advance``: each phase; ``Session.forget`` deletes the record).
``coordinator/transaction/transfer.py`` (``Attempts.retry``) writes a further attempt, and
``coordinator/transaction/rolling.py`` the next batch.
"""
