"""Output of commands: tables, JSON, YAML, names, errors, progress.

Decides which columns an answer has. Commands give data once; the printer chooses the form.

Imports: cli.app, sdk, contract.

Start with ``printer.py`` (``View``, ``show``), ``operations.py`` and ``stages.py``.
"""
