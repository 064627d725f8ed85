"""Cut of a model over the ranks by its own tensor-parallel plan.

Attention and MLP are cut the usual way: column-parallel in, row-parallel out, a sum per block. An output head that the
plan gathers is cut by vocabulary. A head tied to the embedding stays whole, like embeddings, and only rank 0 needs its
result. :mod:`rlctl_torch.model.experts` cuts experts in three-dimensional parameters.
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
"""Known styles of a plan, and the engine's cut for each style."""


class CutLinear(nn.Linear):
    """Linear layer with results that the ranks combine.

    Attributes:
        adapt: function of input and own result that adds to the own result before the ranks combine theirs.
    """

    ranks: Ranks
    adapt: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def own(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute this rank's result, before the ranks combine theirs."""
        out = nn.functional.linear(input, self.weight, bias)
        return out if self.adapt is None else self.adapt(input, out)


class RowParallelLinear(CutLinear):
    """Linear layer with some input columns. The partial results are summed, and the bias is added once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in / size]`` to ``[..., out]``, the same on every rank."""
        out = self.own(input, None)
        self.ranks.sum_in_place(out)
        return out if self.bias is None else out + self.bias


class GatheredLinear(CutLinear):
    """Linear layer with some output rows. The results of all ranks are gathered."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in]`` to ``[..., out]``, the same on every rank."""
        return self.ranks.gather_columns(self.own(input, self.bias))


def styles_of(model: nn.Module, plan: dict[str, str]) -> dict[str, Style]:
    """Return the cut of each planned module. Raises UNSUPPORTED for an unknown style.

    ``plan`` maps module names, with ``*`` for numbers, to styles. A gather inside the model (other than at the output
    head) is refused too: the attention layers would see all heads on every rank.
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
    """Raise UNSUPPORTED if heads or KV heads of the model cannot be divided evenly."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise _unsupported(f"{name} is {heads}, which {size} ranks cannot share evenly")


def cut(model: nn.Module, styles: dict[str, Style], plan: dict[str, str], ranks: Ranks) -> set[str]:
    """Replace the planned layers by this rank's part. The model stays on the meta device.

    Rank r of n gets the r-th of n equal parts of a dimension. Returns the names of parameters with several matrices in
    sequence; rank r gets the r-th part of each matrix. Raises UNSUPPORTED if a layer cannot be divided evenly.
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
    """Raise UNSUPPORTED if a rank holds several slices of the same checkpoint tensor.

    ``parts`` are the checkpoint's tensors at this rank; ``packed`` is the result of :func:`cut`.
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
