"""The admin verbs at one rank, as actions of the engine thread: pause, memory, updates, checks, adapters, sending.

Imports: rlctl_torch.steps, rlctl_torch.model, rlctl_torch.generation, rlctl.contract, rlctl.weights.

Start with ``update.py`` (``Prepare``, ``FromDistributed``, ``Commit``, ``Abort``) and ``pause.py``.
"""
