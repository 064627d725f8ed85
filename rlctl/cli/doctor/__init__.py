"""Checks of ``rlctl doctor``: of this host, and of a fleet as this host sees it.

A check is a function of readings. Readings are taken in one place for each of the two (``read_host``, ``read_fleet``),
so that a check is tested with any readings.

Imports: cli.app, contract, engine, launch, runtime, sdk.

Start with ``findings.py`` (``Finding``), then ``host.py`` (``HOST_CHECKS``) and ``fleet.py`` (``FLEET_CHECKS``).
"""
