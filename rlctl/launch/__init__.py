"""Fleets of processes: a coordinator, engines and gateways, kept as the topology describes them.

Decides when an engine starts, drains, is replaced and is restarted. A launcher decides where the processes run.

Imports: launch.interface, launch.local, launch.ray, sdk, contract, runtime; ``embedded.py`` also coordinator, engine,
transport.

Start with ``fleet_controller.py`` (``LaunchedFleet.want``, ``LaunchedFleet.look``: one step at a time) and
``engine_lifecycle.py`` (``EngineRun.start``; ``EngineRun.advance``; ``EngineRun.again`` after a failure).
``coordinator_calls.py`` bounds the calls to the coordinator. A stage server starts the SGLang or vLLM program:
``engines/rlctl_servers/server/process.py`` (``ServerProcess``). ``deployment.py`` describes the processes that a
supervisor keeps running; ``embedded.py`` runs a coordinator inside the trainer's process.
"""
