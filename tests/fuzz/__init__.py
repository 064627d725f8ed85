"""Random requests to every RPC and every HTTP route: ``tools/fuzz --inputs N [--seed S] [--target NAME]``.

Servers run in this process, with fake engines and real sockets. :mod:`tests.fuzz.worlds` starts the servers and names
their targets, :mod:`tests.fuzz.targets` sends inputs and judges answers, :mod:`tests.fuzz.runner` checks the servers
after each batch. An input is a function of seed, target and index.

Imports: everything.

Start with ``tests/fuzz/runner.py`` (``run``).
"""
