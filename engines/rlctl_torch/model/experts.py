"""Cutting the experts of a layer over the ranks, where transformers keeps them in three-dimensional parameters.

Every rank holds a share of each expert's intermediate features, as it does of a dense MLP's: rows of gate and up,
columns of down. Each then runs all experts that a token was sent to, and what comes out is summed. The routers stay
whole and choose the same experts everywhere.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl_torch.steps.collectives import Ranks


def cut_experts(model: nn.Module, name: str, plan: dict[str, str], ranks: Ranks) -> set[str]:
    """Cut the module of this name, which the plan calls "moe_tp_experts"; on the meta device, where it stays.

    The plan's styles for its parameters say how: "packed_colwise" for gate and up, one after the other in
    ``[experts, 2 * features, hidden]``, "rowwise" for ``[experts, hidden, features]``. Returns the names of the
    parameters that hold several matrices one after the other. Raises UNSUPPORTED for a parameter with another style or
    none, for another layout, and when the features cannot be shared out evenly.
    """
    packed: set[str] = set()
    experts: Any = model.get_submodule(name)
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        raise _unsupported(f"{name} keeps gate and up interleaved or transposed")
    parameters = list(experts.named_parameters(recurse=False))
    if not parameters:
        raise _unsupported(f"its plan cuts {name} as experts, but it holds no weights of its own")
    for parameter, whole in parameters:
        style = _style_of(f"{name}.{parameter}", plan)
        halves, dim = {"packed_colwise": (2, 1), "rowwise": (1, 2)}.get(style, (0, 0))
        if not halves or whole.dim() != 3:
            raise _unsupported(f"its plan cuts {name}.{parameter} as {style or 'nothing that it names'!r}")
        features = whole.shape[dim] // halves
        if features % ranks.size:
            raise _unsupported(f"{name}.{parameter} has {features} features, which {ranks.size} ranks cannot share")
        shape = list(whole.shape)
        shape[dim] = halves * features // ranks.size
        part = torch.empty(shape, dtype=whole.dtype, device="meta")
        setattr(experts, parameter, nn.Parameter(part, requires_grad=False))
        if halves > 1:
            packed.add(f"{name}.{parameter}")
    experts.register_forward_hook(lambda _module, _inputs, out: _summed(out, ranks))
    return packed


def _summed(out: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    out = out.contiguous()
    ranks.sum_in_place(out)
    return out


def _style_of(parameter: str, plan: dict[str, str]) -> str:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), parameter):
            return style
    return ""


def _unsupported(why: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(f"the model cannot be cut over several ranks: {why}", field="tp_size")
