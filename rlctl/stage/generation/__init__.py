"""RolloutService of a stage: generation on its own port, thread and event loop.

Decides, at each request and each message, whether the stage may still serve. The decision itself is
``Serving.refuse`` in ``stage/serving_state.py``; this package asks it.

Imports: stage.serving_state, contract, engine, ports, runtime, transport.

Start with ``service.py`` (``Generation``). ``request_stream.py`` carries many requests over one stream;
``gate_watch.py`` checks requests while the engine is silent.
"""
