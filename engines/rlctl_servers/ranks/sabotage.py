"""A negative control of the decode check, off unless RLCTL_SERVER_SABOTAGE is set at the start of a server.

``stale-decode``: decode steps compute with copies of the embedding and the norms, made at the start; prefill uses the
weights themselves. The bytes that updates write are right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from rlctl.contract.errors import Reason

VARIABLE = "RLCTL_SERVER_SABOTAGE"


def for_decode(model: torch.nn.Module, decodes: Callable[..., bool]) -> None:
    """Make decode steps compute with a stale weight if the environment requests it.

    ``decodes`` returns whether a forward pass with these arguments is a decode step. Raises FIELD_INVALID for an
    unknown negative control.
    """
    control = os.environ.get(VARIABLE, "")
    if not control:
        return
    if control != "stale-decode":
        raise Reason.FIELD_INVALID.error(f"{VARIABLE} is {control!r}, which is no negative control", field=VARIABLE)
    # Servers pack other weights for their kernels, and these kernels do not read the parameter.
    weights = [
        weight for name, weight in model.named_parameters() if name.endswith(("embed_tokens.weight", "norm.weight"))
    ]
    spares, forward = [weight.data.clone() for weight in weights], model.forward

    def exchange() -> None:
        for number, weight in enumerate(weights):
            weight.data, spares[number] = spares[number], weight.data

    def stale(*args: Any, **kwargs: Any) -> Any:
        if not decodes(*args, **kwargs):
            return forward(*args, **kwargs)
        exchange()
        try:
            return forward(*args, **kwargs)
        finally:
            exchange()

    model.forward = stale
