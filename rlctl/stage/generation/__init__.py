"""RolloutService of a stage: generation on its own port, thread and event loop.

Decides when the gate is checked: before a request is accepted, and before each message is sent. The gate decides
whether the stage may serve: ``Serving.refuse`` in ``stage/serving_state.py``.

Imports: stage.serving_state, contract, engine, ports, runtime, transport.

Start with ``service.py`` (``Generation``). ``request_stream.py`` carries many requests over one stream;
``gate_watch.py`` checks requests while the engine is silent.
"""
