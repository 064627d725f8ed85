"""Shared segments: tensors between processes of one host, in ``/dev/shm`` or behind CUDA IPC handles.

Decides who owns a segment, until when it may be read, when its memory is used again, and that a crash leaks
none.

Imports: weights.receiver, weights.tensor, contract.

Start with ``posix.py`` (``OwnedMemory``: file, lock, generation), ``segment.py`` (the message, checked),
``sender.py`` (``SegmentSender.write``) and ``reader.py`` (``SegmentReader.read``).
"""
