"""The weights of a vLLM worker: written through vLLM's own loaders, read back in the form of the computation.

vLLM fuses, pads and packs parameters. Writes follow vLLM's layer-wise reload
(``vllm.model_executor.model_loader.reload``). Parameters go back to the checkpoint's format on the meta device. Loaders
keep tensors until a layer is complete, and the layer is then processed into its former memory. Layers that were not
begun, or are abandoned before completion, get their memory back untouched. :mod:`.parts_held` reads weights back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from rlctl_servers.ranks import sabotage
from rlctl_servers.ranks.model import RankModel, no_shadow
from rlctl_servers.ranks.parameter_views import ParameterViews
from rlctl_servers.ranks.shadow_copy import ShadowCopy

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import UpdateWeightsFromDiskRequest
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.shards.shard_map import ShardMap
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_vllm.worker.expert_packing import repack_on_reload
from rlctl_vllm.worker.parts_held import part_of


class VLLMModel(RankModel):
    """The model of a vLLM worker."""

    product = "vLLM"

    def __init__(self, worker: Any) -> None:
        """``worker``: vLLM's worker object with this rank's model."""
        self._worker = worker
        self.rank = int(worker.rank)
        self.size = int(worker.vllm_config.parallel_config.world_size)
        self.device = torch.device(worker.device)
        repack_on_reload(self._module, self.device)
        self._confirmed = False
        sabotage.for_decode(self._module, self._decodes)

    @property
    def _module(self) -> Any:
        return self._worker.model_runner.get_model()

    def _decodes(self, *_: Any, positions: torch.Tensor, **__: Any) -> bool:
        """Whether every token of a forward pass is the next token of its request."""
        return int(self._worker.model_runner.input_batch.num_reqs) == positions.shape[-1]

    def prepare_load(self, load: Load) -> None:  # noqa: ARG002 - a hook's signature
        """Make the loaders take tensors of the checkpoint's format."""
        from vllm.model_executor.model_loader.reload import layerwise

        with self._context():
            layerwise.initialize_layerwise_reload(self._module)

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002
        """Process remaining layers, and forget state derived from the former weights."""
        self._finish()
        runner = self._worker.model_runner
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            reset = getattr(runner, name, None)
            if reset is not None:
                reset()

    def abandon_load(self, load: Load) -> None:  # noqa: ARG002
        """Give incomplete layers their former memory back."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._module.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finish()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Pass a full tensor to vLLM's loaders. Raises CHECKPOINT_MISMATCH if no loader takes the tensor."""
        # Loaders keep the tensor until its layer is complete, but the caller reuses its memory.
        with self._context():
            loaded = self._module.load_weights([(name, tensor.clone())])
        if loaded is not None and not loaded:
            raise Reason.CHECKPOINT_MISMATCH.error(f"vLLM's loaders have no place for {name!r}")

    def reload(self, request: UpdateWeightsFromDiskRequest) -> None:
        """Load a checkpoint with vLLM's own reload."""
        self._worker.reload_weights(weights_path=request.model_path)

    def together(self, reference: Mapping[str, TensorMeta]) -> list[tuple[str, ...]]:
        """Return names that fill the same layer of vLLM's, which is processed once all have come, and not before."""
        layers: dict[str, list[str]] = {}
        for name in reference:
            layers.setdefault(self._layer_of(name)[0], []).append(name)
        return [tuple(names) for names in layers.values() if len(names) > 1]

    @property
    def confirmed(self) -> bool:
        """Whether the parts have given the digest of the checkpoint that vLLM itself had loaded."""
        return self._confirmed

    def confirm(self) -> None:
        """Record that the parts have given the checkpoint's digest."""
        self._confirmed = True

    def unstaged(self, reference: Mapping[str, TensorMeta]) -> str:
        """Return why a shadow copy is impossible, or ""."""
        if not self._confirmed:
            return "what vLLM holds did not have the digest of a checkpoint"
        quantization = self._worker.vllm_config.model_config.quantization
        if quantization:
            return f"weights of quantization {quantization} are processed after a load"
        try:
            self._views(reference)
        except RlctlError as error:
            return error.message
        return ""

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:  # noqa: ARG002
        """Return a copy of the parameters, if all tensors are views of parameters. Raises UNSUPPORTED."""
        unstaged = self.unstaged(reference)
        if unstaged:
            raise no_shadow(unstaged)
        views = self._views(reference)
        return ShadowCopy(lambda: views.written(self._parameters()), views.bind, device=self.device, ranks=self.size)

    def swap(self, load: Load, copy: Callable[[], None]) -> None:
        """Copy first, because a load begins by taking the parameters away.

        A load without tensors gives the parameters back, and renews the state that attention layers derive from them.
        """
        copy()
        super().swap(load, lambda: None)

    def _views(self, reference: Mapping[str, TensorMeta]) -> ParameterViews:
        return ParameterViews(self.held(reference).shards, self._parameters())

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._module.named_parameters()}

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        """Return the weights that this rank computes with, as parts of the reference's tensors.

        A packed layer is copied, which takes its memory once more. Raises UNSUPPORTED for weights that cannot be read.
        """
        shards = {}
        for name, meta in reference.items():
            path, leaf, part = self._layer_of(name)
            try:
                layer = self._module.get_submodule(path)
            except AttributeError as error:
                raise Reason.UNSUPPORTED.error(f"{name} cannot be read back from vLLM: {error}") from error
            shards[name] = part_of(layer, leaf, part, meta, self.rank, self.size)
        return ShardMap(shards)

    def _layer_of(self, name: str) -> tuple[str, str, int | None]:
        """Return the layer of a checkpoint's tensor, its name there, and its part of a fused layer."""
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        packed: Mapping[str, Sequence[str]] = getattr(self._module, "packed_modules_mapping", None) or {}
        for fused, parts in packed.items():
            if last in parts and last != fused:
                return f"{parent}.{fused}", leaf, list(parts).index(last)
        return path, leaf, None

    def _finish(self) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        with self._context():
            layerwise.finalize_layerwise_reload(self._module, self._worker.vllm_config.model_config)

    def _context(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[Any] = set_current_vllm_config(self._worker.vllm_config)
        return context
