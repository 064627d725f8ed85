"""Cutting a model over the ranks by its own tensor-parallel plan.

Attention and MLP are cut the usual way: column-parallel in, row-parallel out, one sum per block. An output head that
the plan gathers is cut by vocabulary; one that is tied to the embedding stays whole, as embeddings do, and only rank 0
needs what it computes. Experts that lie in three-dimensional parameters are :mod:`rlctl_torch.model.experts`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.tensor.checkpoint_names import Part
from rlctl_torch.model.experts import cut_experts
from rlctl_torch.steps.collectives import Ranks

Style = Literal["column", "row", "gather", "whole", "experts"]

_STYLES: dict[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",
    "embedding_rowwise": "whole",
    "embedding_colwise": "whole",
    "moe_tp_experts": "experts",
}
"""The plan's styles that this engine knows, and how it cuts for them."""


class CutLinear(nn.Linear):
    """A linear layer whose results the ranks put together.

    Attributes:
        adapt: what adds to this rank's own result before that, given the input and the result.
    """

    ranks: Ranks
    adapt: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def own(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What this rank computes."""
        out = nn.functional.linear(input, self.weight, bias)
        return out if self.adapt is None else self.adapt(input, out)


class RowParallelLinear(CutLinear):
    """A linear layer that holds some input columns; the partial results are summed, the bias added once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in / size]`` to ``[..., out]``, the same on every rank."""
        out = self.own(input, None)
        self.ranks.sum_in_place(out)
        return out if self.bias is None else out + self.bias


class GatheredLinear(CutLinear):
    """A linear layer that holds some output rows and gathers the others' results."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]``, the same on every rank."""
        return self.ranks.gather_columns(self.own(input, self.bias))


def styles_of(model: nn.Module, plan: dict[str, str]) -> dict[str, Style]:
    """How each planned module is cut. Raises UNSUPPORTED for a style that this engine does not know.

    ``plan`` maps module names with ``*`` for numbers to styles. A module that the plan gathers inside the model (other
    than its output head) is refused too: the attention layers would see all heads on every rank.
    """
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()  # type: ignore[operator]
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matches = [name for name in modules if regex.fullmatch(name)]
        if matches and style not in _STYLES:
            raise _unsupported(f"its plan cuts {pattern} as {style!r}; known are {', '.join(sorted(_STYLES))}")
        for name in matches:
            cut = _STYLES[style]
            if cut == "gather" and modules[name] is not head:
                raise _unsupported(f"its plan gathers the output of {pattern}, which is not the output head")
            if cut not in ("whole", "experts") and type(modules[name]) is not nn.Linear:
                raise _unsupported(f"its plan cuts {pattern}, a {type(modules[name]).__name__}, not a plain Linear")
            styles[name] = cut
    return styles


def check_divisible(config: object, size: int) -> None:
    """Raise UNSUPPORTED when heads or KV heads of the model cannot be shared out evenly."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise _unsupported(f"{name} is {heads}, which {size} ranks cannot share evenly")


def cut(model: nn.Module, styles: dict[str, Style], plan: dict[str, str], ranks: Ranks) -> set[str]:
    """Replace the planned layers by this rank's part of them; the model is on the meta device and stays there.

    Rank r of n gets the r-th of n equal parts of a dimension; in the parameters whose names are returned, of each of
    several matrices that lie one after the other. Raises UNSUPPORTED when a layer cannot be shared out evenly.
    """
    packed: set[str] = set()
    for name, style in styles.items():
        if style == "whole":
            continue
        if style == "experts":
            packed |= cut_experts(model, name, plan, ranks)
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        divided = layer.in_features if style == "row" else layer.out_features
        if divided % ranks.size:
            raise _unsupported(f"{name} has {divided} features, which {ranks.size} ranks cannot share evenly")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _part(layer, style, ranks))
    return packed


def check_slices(model: nn.Module, parts: Mapping[str, Part], packed: Collection[str]) -> None:
    """Raise UNSUPPORTED when a rank holds several slices of one tensor of the checkpoint.

    ``parts`` are the checkpoint's tensors at this rank; ``packed`` is what :func:`cut` returned.
    """
    for name, part in parts.items():
        if part.source in packed and part.shape == model.get_parameter(part.source).shape:
            raise _unsupported(f"the checkpoint keeps what is cut apart in one tensor, {name}")


def _part(layer: nn.Linear, style: Style, ranks: Ranks) -> nn.Linear:
    inputs, outputs = layer.in_features, layer.out_features
    kind: type[nn.Linear] = {"row": RowParallelLinear, "gather": GatheredLinear}.get(style, nn.Linear)
    if style == "row":
        inputs //= ranks.size
    else:
        outputs //= ranks.size
    part = kind(inputs, outputs, bias=layer.bias is not None, device="meta", dtype=layer.weight.dtype)
    if isinstance(part, CutLinear):
        part.ranks = ranks
    return part


def _unsupported(why: str) -> RlctlError:
    return Reason.UNSUPPORTED.error(f"the model cannot be cut over several ranks: {why}", field="tp_size")
