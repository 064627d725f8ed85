"""Output of commands: tables, JSON, YAML, names, errors, progress.

Decides the columns of each answer. A command returns data, and the printer writes data in the form of ``--output``.

Imports: cli.app, sdk, contract.

Start with ``printer.py`` (``View``; ``show`` selects the form). ``tables.py`` draws tables: ``plain`` for pipes,
``rich`` for terminals. The tables are built in ``operations.py`` (``view``) and ``stages.py`` (``stages_table``);
``columns.py`` has the columns of each verb's answer.
"""
