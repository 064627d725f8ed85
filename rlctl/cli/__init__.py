"""The ``rlctl`` command.

``main.py`` imports the module of a command only when the command is named. Commands are the entries of ``COMMANDS`` in
``main.py`` and the rows of the verb table.

Imports: the packages of each command; ``main.py`` itself only cli.app, cli.render, contract and runtime.

Start with ``main.py`` (``Root``) and ``commands/verbs.py`` (a row of the verb table becomes a command).
"""
