"""The benchmark harness: ``tools/bench NAME``.

The modules here are independent of the benchmarks. A benchmark is a sub-package with a list ``FIGURES``; a
figure is one function in one module. Each figure has a warm-up and interleaved rounds of the product and its
peer, and reports medians with their spread.

Imports: any package of rlctl.

Start with ``rounds.py`` and ``report.py``, then ``fanout``.
"""
