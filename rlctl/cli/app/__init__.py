"""Shared parts of all commands: settings, global options, options from messages, exit codes, the connection.

Decides the source of a setting (flag, environment, context, default) and the exit code of an outcome.

Imports: sdk, contract, runtime, transport.

Start with ``settings.py`` (``Settings``), ``exit_codes.py`` (``Exit``) and ``message_options.py`` (``fields_of``).
"""
