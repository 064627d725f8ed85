"""Checkpoints on disk: safe paths, checked headers, parallel reads, atomic writes.

Decides the paths that a request may name, and whether a directory is a complete checkpoint that all engines read alike.
A crash during a write leaves either the old or the new file.

Imports: weights.tensor, contract.

Start with ``checkpoint.py`` (``open_checkpoint``; ``open_files`` compares the index with the files),
``allowed_roots.py`` (``Roots.resolve``) and ``parallel_read.py`` (``read_parts``). ``load_formats.py`` names the
loaders; ``atomic_write.py`` writes.
"""
