"""Data port of a stage: the HTTP interface of its engine server, behind the gate of the stage.

Decides which routes are open, how long a request waits for the gate, and what becomes of an answer that the gate ends.
The gate is that of RolloutService: ``Serving.refuse`` and ``Serving.refuse_ongoing`` in ``stage/serving_state.py``. The
engine reads the request (``Engine.exchange``) and answers it.

Imports: stage.serving_state, stage.generation, contract, engine, ports, runtime, transport.

Start with ``server.py`` (``DataPort``). ``admission.py`` has the requests wait that the gate does not let in yet.
"""
