"""Shared segments: tensors between processes of one host, in ``/dev/shm`` or behind CUDA IPC handles.

Decides the owner of a segment, the end of its lease, and the reuse of its memory. A later process removes the segments
of a process that has crashed.

Imports: weights.receiver, weights.tensor, contract.

Start with ``posix.py`` (``OwnedMemory``: file, lock, generation), ``segment.py`` (the message, checked), ``sender.py``
(``SegmentSender.write``) and ``reader.py`` (``SegmentReader.read``).
"""
