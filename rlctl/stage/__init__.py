"""A stage server: rank 0 of one engine.

Decides whether a command is legal in the present state, whether it carries the right epoch and update, and what
its outcome changes. The state is derived from facts and never stored.

Imports: worker, command_stream, contract, engine, ports, runtime; ``server.py`` also transport and
stage.generation.

Start with ``facts.py`` (pure: ``Facts.state`` derives the state, ``Facts.refuse`` checks epoch, update and state of a
command, ``Facts.settle`` takes in its outcome) and ``state_machine.py`` (``Stage.attach`` refuses a stale epoch,
``Stage.carry_out`` runs a command, ``Stage.grant`` takes a serving lease). ``relay.py`` sends one command to all
ranks; ``serving_state.py`` is the gate that generation asks.
"""
