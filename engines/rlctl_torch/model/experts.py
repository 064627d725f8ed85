"""Cut of a layer's experts over the ranks, for experts in three-dimensional parameters.

Every rank holds a share of each expert's intermediate features, like the share of a dense MLP: rows of gate and up,
columns of down. Each rank runs all experts to which a token was sent, and the outputs are summed. The routers stay
whole and choose the same experts on every rank.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl_torch.steps.collectives import Ranks


def cut_experts(model: nn.Module, name: str, plan: dict[str, str], ranks: Ranks) -> set[str]:
    """Cut the module ``name``, which the plan calls "moe_tp_experts". The module stays on the meta device.

    The plan's styles of its parameters define the cut. "packed_colwise" is for gate and up in sequence,
    ``[experts, 2 * features, hidden]``; "rowwise" is for ``[experts, hidden, features]``. Returns the names of
    parameters with several matrices in sequence. Raises UNSUPPORTED for an unknown or missing style, for a different
    layout, and for features that cannot be divided evenly.
    """
    packed: set[str] = set()
    experts: Any = model.get_submodule(name)
    if getattr(experts, "is_transposed", False) or not getattr(experts, "is_concatenated", True):
        raise _unsupported(f"{name} keeps gate and up interleaved or transposed")
    parameters = list(experts.named_parameters(recurse=False))
    if not parameters:
        raise _unsupported(f"its plan cuts {name} as experts, but it holds no weights of its own")
    for parameter, full in parameters:
        style = _style_of(f"{name}.{parameter}", plan)
        halves, dim = {"packed_colwise": (2, 1), "rowwise": (1, 2)}.get(style, (0, 0))
        if not halves or full.dim() != 3:
            raise _unsupported(f"its plan cuts {name}.{parameter} as {style or 'nothing that it names'!r}")
        features = full.shape[dim] // halves
        if features % ranks.size:
            raise _unsupported(f"{name}.{parameter} has {features} features, which {ranks.size} ranks cannot share")
        shape = list(full.shape)
        shape[dim] = halves * features // ranks.size
        part = torch.empty(shape, dtype=full.dtype, device="meta")
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
