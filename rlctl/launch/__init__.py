"""Fleets of processes: a coordinator, engines and gateways, kept as wanted.

Decides when an engine starts, drains, is replaced and is restarted. Where processes run is the launcher's
matter.

Imports: launch.interface, launch.local, launch.ray, sdk, contract, runtime; ``embedded.py`` also coordinator,
engine, transport.

Start with ``fleet_controller.py`` (``LaunchedFleet.want``, ``LaunchedFleet.look``: one step at a time) and
``engine_lifecycle.py`` (``EngineRun.advance``). ``deployment.py`` is what a supervisor keeps running;
``embedded.py`` runs a coordinator inside the trainer's process.
"""
