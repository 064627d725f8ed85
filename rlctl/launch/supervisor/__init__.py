"""The process behind ``rlctl up``: owns a fleet, takes changes over a socket, records its state on this machine.

Decides who supervises a fleet name, and what the next ``rlctl up`` finds.

Imports: launch, launch.local, cli.app, cli.render, contract, runtime.

Start with ``supervisor.py`` (``supervise``), ``control_socket.py`` (``apply``) and ``fleet_state.py``
(``FleetState``).
"""
