"""Public test tools: a fake engine, an in-process fleet, links without a network, a chaos proxy.

Production uses nothing of this package; only the entry point ``fake`` names it.

Imports: coordinator, stage, worker, contract, engine, runtime, transport.

Start with ``fake_engine.py`` (``FakeEngine``: the rules of an engine without a model) and ``in_process_fleet.py``
(``InProcessFleet``).
"""
