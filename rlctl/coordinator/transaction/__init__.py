"""A weight update from its plan to its end, as steps made of verbs.

Decides the order pause, prepare, write, commit, flush, verify, publish, admit, resume; which targets are lost; and
whether the evidence suffices. No stage serves a version before its publish.

Imports: coordinator.pauses, coordinator.operations, coordinator.fleet, contract, ports.

Start with ``planner.py`` (``Planner.plan``: version and groups, or the refusal; ``Planner.targets``: the choice of the
targets; ``Planner._digest_key``: the key of keyed digests), then ``update.py`` (``Update``: state, and the steps up to
the commit), ``owner.py`` (``Owner``: lease and decision), ``transfer.py`` (joins, writes, further attempts),
``commit.py`` (``Commit.commit``; ``Commit._publish`` writes the version to the journal). ``verification_levels.py``
decides without I/O (``levels``: the level that each target must prove; ``judge_digests``: whether the proof holds;
``named``: tensor and ranks of a mismatch), and ``verification.py`` commands the targets to digest.
``request_targets.py`` matches writes to targets (``RequestTargets``), ``rolling.py`` goes batch by batch,
``adapters.py`` loads and unloads adapters, ``process_groups.py`` names the groups. ``timeline.py`` records the phases.

A target that fails verification is quarantined in ``commit.py`` (``Commit._without``), and then receives AbortUpdate.
The AbortUpdate makes the stage DIRTY in ``stage/facts.py`` (``Facts.settle``).
"""
