"""RolloutService of a stage: generation on its own TCP port, thread and event loop.

Decides when the gate is checked: before a request is accepted, and before each message is sent. The gate is in
``stage/serving_state.py``: ``Serving.refuse`` refuses a new request, ``Serving.refuse_ongoing`` refuses further
messages of a running request.

Imports: stage.serving_state, contract, engine, ports, runtime, transport.

Start with ``service.py`` (``Generation``). ``request_stream.py`` carries many requests over one stream.
``gate_watch.py`` calls ``Serving.refuse_ongoing`` before each message (``OngoingRequest.within``), and twice a second
while the engine is silent (``Ongoing``).
"""
