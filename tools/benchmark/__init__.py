"""The one benchmark harness: ``tools/bench NAME``.

The harness (this package's own modules) knows nothing of what is measured: a benchmark is a sub-package with a list
``FIGURES``, and a figure is one function in one small file. What every figure keeps to: a warm-up, then interleaved
rounds of the product and its peer in the same run, medians with their spread, and the floor that was measured beside
it.
"""
