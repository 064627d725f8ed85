"""Data port of a stage: the HTTP interface of its engine server, behind the gate of the stage.

Decides the open routes, the time that a request waits for the gate, and the end of an answer that the gate cuts. The
gate is that of RolloutService: ``Serving.refuse`` and ``Serving.refuse_ongoing`` in ``stage/serving_state.py``. The
engine reads the request (``Engine.exchange``) and answers it.

Imports: stage.serving_state, stage.generation, contract, engine, ports, runtime, transport.

Start with ``server.py`` (``DataPort``). In ``admission.py``, requests wait until the gate admits them.
"""
