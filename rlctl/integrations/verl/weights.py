"""The weights of verl's training engine as a source for a publisher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.tied_names import Spare


class TrainingWeights:
    """A training engine's weights as a :class:`rlctl.weights.tensor.source.WeightSource`, gathered anew in every pass.

    verl's transfer engines get a generator, usable once. Collecting the generator would take the memory of the whole
    model at every rank, so the engine is asked again.
    """

    def __init__(self, engine: Any) -> None:
        """``engine``: verl's ``BaseEngine``. Iterates over the weights, and keeps no weights.

        Every rank must make this object, since gathering takes every rank. Raises as :meth:`tensors`.
        """
        self.engine = engine
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in self.tensors()]

    def metas(self) -> list[TensorMeta]:
        """Return every tensor's description, from the time of construction."""
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors, under the names of the checkpoint. Raises UNSUPPORTED for unmerged adapters."""
        tensors, peft_config = self.engine.get_per_tensor_param()
        if peft_config is not None:
            raise Reason.UNSUPPORTED.error(
                "the fleet takes whole weights from verl, and these are an adapter's",
                field="actor_rollout_ref.model.lora.merge",
                next_step="Set it to true.",
            )
        yield from tensors

    def spares(self) -> dict[str, Spare]:
        """Return names of tied tensors, which checkpoints may omit, with the names of the tensors that they share."""
        names, tied = {meta.name for meta in self._metas}, _tied(self.engine.module)
        return {name: Spare((of,)) for name, of in tied.items() if name in names and of in names}


def _tied(module: Any) -> Mapping[str, str]:
    """Return names of tied tensors with the tensors that they share, as in transformers, with or without FSDP."""
    return getattr(getattr(module, "_fsdp_wrapped_module", module), "all_tied_weights_keys", None) or {}
