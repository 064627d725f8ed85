"""Checks of ``rlctl doctor``: of this host, and of a fleet as this host sees it.

A check is a function of readings. ``read_host`` takes all readings of the host and ``read_fleet`` all readings of the
fleet, so that a test can run a check with any readings.

Imports: cli.app, contract, engine, launch, runtime, sdk.

Start with ``findings.py`` (``Finding``), then ``host.py`` (``HOST_CHECKS``) and ``fleet.py`` (``FLEET_CHECKS``).
"""
