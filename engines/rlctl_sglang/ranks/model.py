"""The weights of one SGLang rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from rlctl_servers.ranks import sabotage
from rlctl_servers.ranks.element_layout import Layout, Omitted, find_layout
from rlctl_servers.ranks.host_memory import available_bytes
from rlctl_servers.ranks.model import LoaderMap, MemoryMap, Places, RankModel, no_shadow
from rlctl_servers.ranks.shadow_copy import ShadowCopy

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, WEIGHT_SELECTOR_DRAFT, WEIGHT_SELECTOR_TARGET
from rlctl.v1.verbs_pb2 import UpdateWeightsFromDiskRequest
from rlctl.weights.shards.load_hooks import Load
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.tensors import TensorMeta

log = logging.getLogger(__name__)


def _decodes(_ids: object, _positions: object, forward_batch: Any, *_: object, **__: object) -> bool:
    return bool(forward_batch.forward_mode.is_decode())


_SELECTORS = {WEIGHT_SELECTOR_TARGET: "target", WEIGHT_SELECTOR_DRAFT: "draft"}


class SGLangModel(RankModel):
    """The model of one tensor-parallel rank.

    An update is written to the target model's parameters if the place of every checkpoint element there is known, and
    the digest was once that of the checkpoint. Otherwise, and into draft models, SGLang's own loaders write.
    """

    product = "SGLang"

    def __init__(self, manager: Any) -> None:
        """``manager``: the scheduler's ``SchedulerWeightUpdaterManager``."""
        from sglang.srt.runtime_context import get_parallel

        self._manager = manager
        self._runner = manager.tp_worker.model_runner
        parallel = get_parallel()
        self.rank = int(parallel.tp_rank)
        self.size = int(parallel.tp_size)
        device = str(self._runner.device)
        self.device = torch.device(device, self._runner.gpu_id) if device == "cuda" else torch.device(device)
        self._layout: Layout | None = None
        self._confirmed = False
        self._why = "its layout was not looked for"
        self._loading: list[Any] = []
        self._loader = ""
        sabotage.for_decode(self.module, _decodes)

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._runner.model
        return module

    # Loading.

    def prepare_load(self, load: Load) -> None:
        """Unpack the weights that SGLang packs after a load. Raises UNSUPPORTED if derived copies would remain."""
        self._begin(self._refuse(_SELECTORS.get(load.selector, "all")))

    def _refuse(self, selector: str) -> list[Any]:
        """Return the runners of a load. Raises ILLEGAL_STATE, MEMORY_RELEASED, UNSUPPORTED."""
        if self._manager._session is not None:
            raise Reason.ILLEGAL_STATE.error(
                "a weight update that another client has begun is open at SGLang",
                next_step="Close it with POST /end_weight_update, or start SGLang again.",
            )
        self._refuse_released()
        runners = [runner for _, runner in self._manager._select_runners(selector)]
        for runner in runners:
            _refuse_derived(runner.model)
        return runners

    def _refuse_released(self) -> None:
        if "weights" in self._manager.offload_tags:
            raise Reason.MEMORY_RELEASED.error("the weights are released at SGLang")

    def _begin(self, runners: Iterable[Any]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a forward pass may be under way on a stream of its own
        for runner in runners:
            self._loading.append(runner)
            runner.weight_updater.begin_weight_update()

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002 - a hook's signature
        """Let SGLang derive and pack the weights anew."""
        runners, self._loading, self._loader = self._loading, [], ""
        for runner in runners:
            runner.weight_updater.end_weight_update(run_post_load=True)

    def abandon_load(self, load: Load) -> None:
        """Do as :meth:`finalize_load`. The weights are a mixture, so a failure is only logged."""
        try:
            self.finalize_load(load)
        except Exception:
            log.exception("rlctl: SGLang does not close a load")

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Hand a full tensor to the loaders of the update's models."""
        for runner in self._loading:
            self._load_into(runner, [(name, tensor)])

    def _load_into(self, runner: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self._loader:
            from sglang.srt.utils import dynamic_import

            dynamic_import(self._loader)(runner.model, list(tensors))
        else:
            runner.model.load_weights(tensors)

    def reload(self, request: UpdateWeightsFromDiskRequest) -> None:
        """Let SGLang load a checkpoint. Raises ENGINE_FAILED."""
        self._refuse_released()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for _, runner in self._manager._select_runners():
            done, message = runner.weight_updater.update_weights_from_disk(
                request.model_path, "auto", recapture_cuda_graph=request.options.recapture_cuda_graph
            )
            if not done:
                raise Reason.ENGINE_FAILED.error(f"SGLang: {message}")
        if request.options.torch_empty_cache and self.device.type == "cuda":
            torch.cuda.empty_cache()

    # Reading.

    def adapters(self) -> list[str]:
        """Return the names of the loaded adapters; none if SGLang was started without adapters."""
        manager = getattr(self._runner, "lora_manager", None)
        return [reference.lora_name for reference in manager.lora_refs.values()] if manager is not None else []

    def learned(self, reference: Mapping[str, TensorMeta]) -> bool:
        """Return whether the layout of these tensors is known."""
        return self._layout is not None and self._layout.metas == dict(reference)

    def learn(self, reference: Mapping[str, TensorMeta]) -> None:
        """Find the place of each element of the checkpoint, and restore the weights.

        Raises UNSUPPORTED if the places cannot be found, or the host has no memory for a copy of the weights;
        ENGINE_FAILED (DIRTY) if the weights could not be restored.
        """
        if self.learned(reference):
            return
        self._layout, self._confirmed = None, False
        try:
            self._layout = self._find_out(reference)
        except RlctlError as error:
            self._why = error.message
            raise
        self._why = "what lies at the places of its tensors did not have the digest of a checkpoint"

    def held(self, reference: Mapping[str, TensorMeta]) -> ShardMap:
        """Return views into the parameters. Raises UNSUPPORTED for an unknown layout."""
        if self._layout is None:
            raise Reason.UNSUPPORTED.error(f"SGLang's weights cannot be read: {self._why}")
        self._refuse_released()
        return _parts(self._layout, reference, self._parameters())

    def places(self, reference: Mapping[str, TensorMeta]) -> Places:
        """Return the parameters' memory for a known and confirmed layout, else SGLang's loaders."""
        if self._layout is None or not self._confirmed:
            return LoaderMap(reference, self)
        try:
            return MemoryMap(lambda: self.held(reference).shards, self._others, self)
        except RlctlError as error:
            if error.reason is Reason.MEMORY_RELEASED:
                raise
            # The parameters have a different form now. The next stage server starts a new search for the places.
            self._layout, self._confirmed, self._why = None, False, error.message
            return LoaderMap(reference, self)

    def unstaged(self, reference: Mapping[str, TensorMeta]) -> str:
        """Return why SGLang's loaders take the tensors of all updates, or "". Raises MEMORY_RELEASED."""
        if not isinstance(self.places(reference), MemoryMap):
            return f"SGLang's loaders take its tensors, and {self._why}"
        if len(self._manager._select_runners("all")) > 1:
            return "SGLang's loaders take the tensors of its draft model"
        return ""

    def shadow(self, reference: Mapping[str, TensorMeta], load: Load) -> ShadowCopy:
        """Return a copy of the tensors' parameters, for a known layout.

        Raises UNSUPPORTED, ILLEGAL_STATE, MEMORY_RELEASED.
        """
        self._refuse(_SELECTORS.get(load.selector, "all"))
        unstaged, layout = self.unstaged(reference), self._layout
        if unstaged or layout is None:
            raise no_shadow(unstaged)
        written = {piece.parameter for pieces in layout.pieces.values() for piece in pieces}

        def parameters() -> dict[str, torch.Tensor]:
            return {name: tensor for name, tensor in self._parameters().items() if name in written}

        bind = partial(_parts, layout, reference)
        return ShadowCopy(parameters, bind, device=self.device, ranks=self.size)

    @property
    def confirmed(self) -> bool:
        """Return whether the views have given the digest of a checkpoint that SGLang itself had loaded."""
        return self._confirmed

    def confirm(self) -> None:
        """Record that the views have given the digest of the checkpoint."""
        self._confirmed = True

    def use_loader(self, load_format: str) -> None:
        """Select a loader of the user. Raises UNSUPPORTED if SGLang was not started with this loader."""
        loaders = self._runner.weight_updater.custom_weight_loaders
        if load_format and load_format not in loaders:
            raise Reason.UNSUPPORTED.error(f"SGLang was not started with a loader {load_format!r}", field="load_format")
        self._loader = load_format

    def _others(self) -> bool:
        """Return whether the loaders take the tensors: also for a draft model, or with a loader of the user."""
        return bool(self._loader) or any(runner is not self._runner for runner in self._loading)

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers of the target model: a checkpoint may be loaded into both."""
        tensors = {name: parameter.detach() for name, parameter in self.module.named_parameters(remove_duplicate=False)}
        tensors.update((name, buffer.detach()) for name, buffer in self.module.named_buffers(remove_duplicate=False))
        return tensors

    def _find_out(self, reference: Mapping[str, TensorMeta]) -> Layout:
        quantization = self._runner.model_config.quantization
        if quantization:
            raise Reason.UNSUPPORTED.error(f"weights of quantization {quantization} are processed after a load")
        self._refuse("target")
        addresses = self._addresses()
        copies = self._copies()
        load = Load("layout", full=True, selector=WEIGHT_SELECTOR_TARGET)

        def load_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            self._begin([self._runner])
            try:
                self._runner.model.load_weights(tensors)
            finally:
                self.finalize_load(load)

        layout, failure = None, ""
        try:
            layout = find_layout(
                reference, load_all, self._parameters, aliases=self._tied(reference), device=self.device
            )
        except Exception as error:  # noqa: BLE001 - the weights are put back after any error of a loader
            failure = f"{type(error).__name__}: {error}"
        try:
            # As in an update, SGLang derives values from the weights anew.
            self._begin([self._runner])
            unpacked = self._addresses()
            for name, parameter in self._parameters().items():
                parameter.copy_(copies[name])
            self.finalize_load(load)
        except Exception as error:
            cause = f"SGLang's weights could not be put back: {type(error).__name__}: {error}"
            raise Reason.ENGINE_FAILED.error(cause, outcome=OUTCOME_DIRTY) from error
        if layout is None:
            raise Reason.UNSUPPORTED.error(f"SGLang's loaders do not take tensors in turn: {failure}")
        if not unpacked == addresses == self._addresses():
            raise Reason.UNSUPPORTED.error(
                "SGLang packs its parameters after a load, so they differ from those during a load"
            )
        for name, omission in layout.omissions.items():
            if omission.kind is not Omitted.ABSENT:
                raise Reason.UNSUPPORTED.error(f"the place of {name} is not known: {omission.text}")
        copied = [name for name in reference if len(layout.pieces.get(name, ())) > 1]
        if copied:
            raise Reason.UNSUPPORTED.error(f"SGLang stores {copied[0]} in several places")
        return layout

    def _addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._parameters().items()}

    def _copies(self) -> dict[str, torch.Tensor]:
        """Return copies in the host's memory. Raises UNSUPPORTED if there is no room."""
        tensors = self._parameters()
        needed = sum({_memory(tensor): tensor.nbytes for tensor in tensors.values()}.values())
        room = available_bytes() // self.size
        if needed > room // 2:
            raise Reason.UNSUPPORTED.error(
                f"a copy of the weights needs {needed} bytes of the host's memory, of which {room} are available for "
                "each rank"
            )
        copies: dict[Any, torch.Tensor] = {}
        for tensor in tensors.values():
            if _memory(tensor) not in copies:
                copies[_memory(tensor)] = tensor.to("cpu", copy=True)
        return {name: copies[_memory(tensor)] for name, tensor in tensors.items()}

    def _tied(self, reference: Mapping[str, TensorMeta]) -> dict[str, str]:
        """Return the heads of models with tied embeddings, each with the embedding in its place."""
        if not getattr(self._runner.model_config.hf_text_config, "tie_word_embeddings", False):
            return {}
        embeddings = [name for name in reference if name.endswith("embed_tokens.weight")]
        heads = [name for name in reference if name.endswith("lm_head.weight")]
        return dict(zip(heads, embeddings, strict=False))


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same elements."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _parts(layout: Layout, reference: Mapping[str, TensorMeta], parameters: Mapping[str, torch.Tensor]) -> ShardMap:
    """Return the rank's parts of the tensors, as views of these parameters. Raises INTERNAL for other forms."""
    shards = layout.bind(parameters)
    parts = {name: shards.get(name) or _nothing(meta) for name, meta in reference.items()}
    return ShardMap({name: part for name, part in parts.items() if part is not None})


def _nothing(meta: TensorMeta) -> Shard | None:
    """Return an empty part of a tensor, or None, since a tensor without dimensions has no parts."""
    if not meta.shape:
        return None
    return Shard(meta, torch.empty((0, *meta.shape[1:]), dtype=meta.dtype), Slice(0, 0, 0))


def _refuse_derived(model: torch.nn.Module) -> None:
    """Raise UNSUPPORTED if SGLang does not derive all copies of weights anew after a load, or shares weights."""
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_model

    cause = weight_updater._unsupported_derived_weight_cache_error(model)
    if cause:
        raise Reason.UNSUPPORTED.error(f"SGLang: {cause}")
    if get_model().weight_cache_mode != "off":
        raise Reason.UNSUPPORTED.error("with --weight-cache-mode the weights are shared with other servers")
