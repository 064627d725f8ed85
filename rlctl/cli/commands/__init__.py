"""A module for each command or noun. Heavy imports are inside the functions.

Imports: cli.app, cli.render, and the packages that the command drives.

Start with ``status.py`` for a read, ``drain.py`` for a change, ``verbs.py`` for the commands of the verb table.
"""
