"""Metrics for Prometheus, of coordinators, stage servers and gateways; off by default.

Decides the name, type, labels and help of every metric. Values that a process knows are read when Prometheus asks for
them; events are counted when they happen.

Imports: contract, runtime; ``exposition.py`` also prometheus_client, which the extra ``[metrics]`` installs. A process
imports ``exposition.py`` only if it was started with ``--metrics``.

Start with ``definitions.py`` (``Metric``, ``METRICS``), from which docs/reference/metrics.md is made, and
``exposition.py`` (``Exposition``: the values of one process and their HTTP server). The values come from
``coordinator/metrics.py``, ``stage/metrics.py`` and ``gateway/metrics.py``.
"""
