"""Steps, which all ranks do together: the plan of a step, ordered commands, collectives, background work.

Imports: rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``ordered_commands.py`` (``CommandStream``, ``Action``) and ``step_plan.py`` (``Plan``).
"""
