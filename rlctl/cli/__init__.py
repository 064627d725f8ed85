"""The ``rlctl`` command.

``main.py`` finds a command by its words and imports its module only then. Commands are the entries of
``COMMANDS`` in ``main.py`` and the rows of the verb table.

Imports: everything that a command needs; ``main.py`` itself only cli.app, cli.render, contract and
runtime.

Start with ``main.py`` (``Root``) and ``commands/verbs.py`` (a row of the verb table becomes a command).
"""
