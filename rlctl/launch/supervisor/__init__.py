"""The process behind ``rlctl up``: owns a fleet, takes changes over a socket, records the state on this machine.

Decides which process supervises a fleet name, and which state a later ``rlctl up`` starts from.

Imports: launch, launch.local, cli.app, cli.render, contract, runtime.

Start with ``supervisor.py`` (``supervise``), ``control_socket.py`` (``apply``) and ``fleet_state.py`` (``FleetState``).
"""
