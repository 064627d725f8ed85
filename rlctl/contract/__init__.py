"""Rules of the contract for every other package: verbs, errors, outcomes, validation. Pure: no I/O, no clock.

Decides which verbs exist and in which states they are legal, which scope a call needs, why a request is refused, when a
request is valid, and how the results of ranks add up to a stage and an operation.

Imports: nothing of rlctl but the generated stubs.

Start with ``verbs.py`` (the table ``_ROWS``: a new verb is one row, and the steps of CONTRIBUTING.md, "Add a verb"),
``errors.py`` (``Reason``: reason, status, exception, next step), ``access.py`` (``refusal``: whether a principal may
call), ``outcomes.py`` (``of_ranks``: the outcome of a command at a stage) and ``validation.py`` (``check``), which
applies the rules of the package ``rules``. The state of a stage is decided in ``stage/facts.py`` (``Facts.settle``,
``Facts.state``).
"""
