"""Shared parts of all commands: settings, global options, options from messages, exit codes, the connection.

Decides where a setting comes from (flag, environment, context, default) and which exit code an outcome has.

Imports: sdk, contract, runtime, transport.

Start with ``settings.py`` (``Settings``), ``exit_codes.py`` (``Exit``) and ``message_options.py``
(``fields_of``).
"""
