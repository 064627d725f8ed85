"""Generation requests before they are scheduled.

Decides why a request is refused, and which samples a request has.

Imports: rlctl_torch.generation, rlctl_torch.disaggregation, rlctl.contract.

Start with ``intake.py`` (``Intake.submit``). ``prefill_decode.py`` runs a request at a prefill or decode engine
(``prefill``, ``decode``).
"""
