"""How the ranks act in step: the plan of a step, ordered commands, collectives, background work.

Imports: rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``ordered_commands.py`` (``CommandStream``, ``Action``) and ``step_plan.py`` (``Plan``).
"""
