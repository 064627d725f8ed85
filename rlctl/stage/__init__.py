"""A stage server: rank 0 of one engine.

Decides whether a command is legal in the present state and has the right epoch and update. Applies the outcome. The
state is derived from facts and never stored.

Imports: worker, command_stream, contract, engine, ports, runtime; ``server.py`` also transport and stage.generation.

Start with ``facts.py`` and ``state_machine.py``. The facts are pure: ``Facts.state`` derives the state,
``Facts.refuse`` refuses a command for its epoch, update or state, and ``Facts.settle`` applies its outcome. A verb that
changes anything is refused under any epoch but the present epoch. ``Stage.attach`` refuses an older epoch,
``Stage.carry_out`` runs a command, and ``Stage.grant`` takes a serving lease. ``relay.py`` sends a command to all
ranks. ``serving_state.py`` is the gate of generation: ``Serving.refuse`` for new requests, ``Serving.refuse_ongoing``
for running requests. ``Facts.vouched`` decides whether tokens of a running request come from an admitted version.
"""
