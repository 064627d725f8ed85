"""``rlctl demo``: a tiny Llama trained by GRPO on sums of two digits, through a real fleet on this machine.

Imports: launch, sdk, trainer, rollout, contract.

Start with ``loop.py`` (``run``). ``task.py`` has the sums, ``tiny.py`` the model, ``grpo.py`` the trainer,
``judge.py`` the verdict, ``show.py`` the output.
"""
