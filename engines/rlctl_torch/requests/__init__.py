"""Requests before they are scheduled: everything that can be refused is refused here.

Imports: rlctl_torch.generation, rlctl_torch.disaggregation, rlctl.contract.

Start with ``admission.py`` (``Intake``). ``prefill_decode.py`` is one half of a pair's request.
"""
