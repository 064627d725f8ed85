"""Output of commands: tables, JSON, YAML, names, errors, progress.

Decides the columns of each answer. A command returns data, and the printer writes them in the form of ``--output``.

Imports: cli.app, sdk, contract.

Start with ``printer.py`` (``View``, ``show``), ``operations.py`` and ``stages.py``.
"""
