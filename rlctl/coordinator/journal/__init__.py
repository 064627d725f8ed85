"""The durable record of the coordinator.

Decides the file format, its migrations and the lock of the file. A damaged record stops the start of the coordinator
and is never skipped. The messages are in ``protos/rlctl/v1/journal.proto``.

Imports: contract, ports, runtime.

Start with ``sqlite.py`` (``SqliteJournal.write``: one thread, grouped commits). ``start_over.py`` replaces a journal
for ``--new`` and keeps epoch and sequences. ``files.py`` copies and replaces files that no coordinator has open;
``coordinator/maintenance.py`` decides which of these files are sound.

``coordinator/updates/manager.py`` (``Updates._start``) writes the record of an update together with its operation, and
has the end of the operation delete the record. ``coordinator/transaction/update.py`` (``Update.record_published``)
writes its publication, ``coordinator/transaction/transfer.py`` (``Transfer.retry``) a further attempt, and
``coordinator/transaction/rolling.py`` the next batch.
"""
