"""The users of a simulated fleet: trainers, operators, clients, callers of invalid requests.

Imports: tests.simulator.processes, tests.simulator.model, tests.simulator.ports, rlctl.command_stream,
rlctl.contract, rlctl.client, rlctl.trainer, rlctl.weights.

Start with ``trainer.py`` (``Trainer``) and ``operators_and_clients.py``.
"""
