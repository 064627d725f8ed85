"""Prometheus metrics of coordinators, stage servers and gateways; off by default.

Decides the name, type, labels and help of every metric. States are read at each scrape of Prometheus; events are
counted when they happen.

Imports: contract, runtime; ``exposition.py`` also prometheus_client, which the extra ``[metrics]`` installs. A process
imports ``exposition.py`` only if started with ``--metrics``.

Start with ``definitions.py`` (``Metric``, ``METRICS``), the source of docs/reference/metrics.md, and ``exposition.py``
(``Exposition``: the values of one process and their HTTP server). The values come from ``coordinator/metrics.py``,
``stage/metrics.py`` and ``gateway/metrics.py``.
"""
