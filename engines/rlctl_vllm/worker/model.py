"""The weights of one of vLLM's workers: written through vLLM's own loaders, read back as it computes with them.

vLLM fuses, pads and packs parameters. Writing goes the way of its layer-wise reload
(``vllm.model_executor.model_loader.reload``): parameters go back to the checkpoint's format on the meta device, loaders
keep what they are given until a layer is complete, and the layer is then processed into the memory that it had. Layers
that were not begun, or are abandoned before they are complete, get their memory back untouched.
Reading: :mod:`.parts_held`.
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
    """The model of one worker."""

    product = "vLLM"

    def __init__(self, worker: Any) -> None:
        """``worker``: vLLM's."""
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
        """Whether every token of a forward pass is the next one of its request."""
        return int(self._worker.model_runner.input_batch.num_reqs) == positions.shape[-1]

    def prepare_load(self, load: Load) -> None:  # noqa: ARG002 - a hook's signature
        """Make the loaders take tensors of the checkpoint's format."""
        from vllm.model_executor.model_loader.reload import layerwise

        with self._context():
            layerwise.initialize_layerwise_reload(self._module)

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002
        """Process what is left, and forget what was derived from the weights before."""
        self._finish()
        runner = self._worker.model_runner
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            reset = getattr(runner, name, None)
            if reset is not None:
                reset()

    def abandon_load(self, load: Load) -> None:  # noqa: ARG002
        """Give layers that are not complete the memory back that they had."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self._module.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finish()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Hand a full tensor to vLLM's loaders. Raises CHECKPOINT_MISMATCH when they have no place for it."""
        # Loaders keep it until its layer is complete; the caller uses its memory again.
        with self._context():
            taken = self._module.load_weights([(name, tensor.clone())])
        if taken is not None and not taken:
            raise Reason.CHECKPOINT_MISMATCH.error(f"vLLM's loaders have no place for {name!r}")

    def reload(self, request: UpdateWeightsFromDiskRequest) -> None:
        """Have vLLM load a checkpoint."""
        self._worker.reload_weights(weights_path=request.model_path)

    def together(self, reference: Mapping[str, TensorMeta]) -> list[tuple[str, ...]]:
        """Names that fill one layer of vLLM's: it is processed once all have come, and not before."""
        layers: dict[str, list[str]] = {}
        for name in reference:
            layers.setdefault(self._layer_of(name)[0], []).append(name)
        return [tuple(names) for names in layers.values() if len(names) > 1]

    @property
    def confirmed(self) -> bool:
        """Whether the parts have given the digest of the checkpoint that vLLM itself had loaded."""
        return self._confirmed

    def confirm(self) -> None:
        """The parts have given the digest of the checkpoint."""
        self._confirmed = True

    def unstaged(self, reference: Mapping[str, TensorMeta]) -> str:
        """Why vLLM's loaders take the tensors of all updates."""
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
        """A copy of the parameters, where all tensors are views of them. Raises UNSUPPORTED."""
        unstaged = self.unstaged(reference)
        if unstaged:
            raise no_shadow(unstaged)
        views = self._views(reference)
        return ShadowCopy(lambda: views.written(self._parameters()), views.bind, device=self.device, ranks=self.size)

    def swap(self, load: Load, copy: Callable[[], None]) -> None:
        """Copy first: a load begins by taking the parameters away. Without a tensor it gives them back, and derives
        anew what attention layers derive from them.
        """
        copy()
        super().swap(load, lambda: None)

    def _views(self, reference: Mapping[str, TensorMeta]) -> ParameterViews:
        return ParameterViews(self.held(reference).shards, self._parameters())

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._module.named_parameters()}

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        """What this rank computes with, as parts of the reference's tensors.

        Packed layers are copied: as much memory again as they take. Raises UNSUPPORTED for what cannot be read.
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
        """The layer that a checkpoint's tensor goes to, its name there, and which part of a fused one it is."""
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
