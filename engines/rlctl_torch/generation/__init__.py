"""From scheduled tokens to output: batching, forward pass, sampling, text, output streams.

Imports: rlctl_torch.model, rlctl_torch.steps, rlctl_torch.disaggregation, rlctl.contract.

Start with ``scheduler.py`` (``Scheduler``, rank 0 only) and ``forward_pass.py`` (``run``).
"""
