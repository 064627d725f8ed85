"""The simulated engine: ranks in step, weights, requests that produce tokens.

Imports: tests.simulator.model, tests.simulator.ports, tests.simulator.context, rlctl.engine, rlctl.contract.

Start with ``engine.py`` (``SimEngine``) and ``receive.py`` (``Intake``).
"""
