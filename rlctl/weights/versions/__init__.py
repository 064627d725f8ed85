"""Versions as files: written complete or as a delta, and pulled into a local directory.

Decides the layout and manifest of a version, and the deltas that lead to it. A pull replaces only directories of
earlier pulls.

Imports: weights.checkpoint, weights.tensor, contract.

Start with ``manifest.py`` (``Manifest``), ``publish.py`` (``publish_full``, ``publish_delta``) and ``pull.py``
(``pull``). ``slime_layout.py`` reads versions in slime's layout.
"""
