"""From a YAML file to what is to run: document → schema → resolve → plan → diff. No I/O beyond reading the file.

:func:`rlctl.topology.resolve.resolve` gives the topology, or every problem of the file at once;
:func:`rlctl.topology.plan.plan` the engines, ranks and devices; :func:`rlctl.topology.diff.difference` what that
changes in a fleet that runs. The keys are one table, :mod:`rlctl.topology.schema`; editors get it as JSON Schema.
"""
