"""What a training engine of verl's holds, as weights that a publisher can go through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl.weights.tensor.tied_names import Spare


class TrainingWeights:
    """A training engine's weights as a :class:`rlctl.weights.tensor.source.WeightSource`, gathered anew in every pass.

    verl gives an engine of transfers a generator, which is gone through once. To collect it would take the memory of
    the whole model at every rank, so the engine is asked again.
    """

    def __init__(self, engine: Any) -> None:
        """``engine``: verl's ``BaseEngine``. Goes through its weights, which takes every rank, and keeps none.

        Raises as :meth:`tensors`.
        """
        self.engine = engine
        self._metas = [TensorMeta.of(name, tensor) for name, tensor in self.tensors()]

    def metas(self) -> list[TensorMeta]:
        """Every tensor's description, as they were when it was made."""
        return self._metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors, under the names of the checkpoint. Raises UNSUPPORTED for adapters that are not merged."""
        named, peft_config = self.engine.get_per_tensor_param()
        if peft_config is not None:
            raise Reason.UNSUPPORTED.error(
                "the fleet takes whole weights from verl, and these are an adapter's",
                field="actor_rollout_ref.model.lora.merge",
                next_step="Set it to true.",
            )
        yield from named

    def spares(self) -> dict[str, Spare]:
        """Names of tied tensors, which checkpoints may leave out, with the names of the tensors that they are."""
        given, tied = {meta.name for meta in self._metas}, _tied(self.engine.module)
        return {name: Spare((of,)) for name, of in tied.items() if name in given and of in given}


def _tied(module: Any) -> Mapping[str, str]:
    """Names of tensors that are others', with these: as transformers has them, under FSDP or not."""
    return getattr(getattr(module, "_fsdp_wrapped_module", module), "all_tied_weights_keys", None) or {}
