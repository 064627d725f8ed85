"""Shrinking of a failing seed to the steps that its failure needs."""

from __future__ import annotations

from tests.simulator.runner import Result, run


def shrink(failed: Result, off: frozenset[str], trials: int) -> frozenset[str]:
    """Return keys of steps that can be omitted without changing the first broken promise.

    Tries halves, then ever smaller parts of the remaining steps, in at most ``trials`` runs (delta debugging: A.
    Zeller, R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002, without its complements).
    """
    invariant = failed.violations[0].partition(":")[0]
    dropped: frozenset[str] = frozenset()
    kept = list(dict.fromkeys(failed.steps))
    size = max(1, len(kept) // 2)
    while trials > 0:
        smaller = False
        for start in range(0, len(kept), size):
            part = kept[start : start + size]
            trials -= 1
            if trials < 0:
                break
            again = run(failed.seed, off, dropped=dropped | frozenset(part))
            if any(violation.startswith(invariant + ":") for violation in again.violations):
                dropped |= frozenset(part)
                smaller = True
        # A trainer that fails earlier makes different requests.
        kept = [step for step in dict.fromkeys(kept) if step not in dropped]
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return dropped
