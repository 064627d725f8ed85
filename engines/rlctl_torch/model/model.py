"""This rank's part of the model, built from a checkpoint directory, with its shard map.

The model class is transformers' own. The model is built and cut on the meta device, and only then given memory: no rank
ever holds more than its part. A model that cannot be served is refused here with the cause; nothing is guessed.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.checkpoint.checkpoint import Checkpoint, StoredWeights, compare
from rlctl.weights.formats.block_fp8 import SCALE, BlockSize, block_size_of, scales_of
from rlctl.weights.shards.load_hooks import Load, LoadHooks
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.checkpoint_names import Part, checkpoint_parts
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_torch.model import tensor_parallel
from rlctl_torch.model.attention import IMPLEMENTATION, recording
from rlctl_torch.model.block_fp8 import ScalePlace, compute_dequantised, expected_scales, hold_codes
from rlctl_torch.model.kv_cache import LayerShape
from rlctl_torch.options import float_dtype, float_dtypes
from rlctl_torch.steps.collectives import Broken, Ranks

Place = Part | ScalePlace
"""Place of a checkpoint tensor in the module's tensors."""

_building = threading.Lock()
"""Lock of the build: transformers uses the process's default dtype, so engines in the same process take turns."""

_LAYER_KINDS = {"full_attention", "sliding_attention"}

_IDENTITY = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
"""Settings that must agree before a checkpoint is loaded into a running model. Shapes alone do not reveal a different
number of heads or a different rotary base.
"""


@dataclass
class Model(LoadHooks):
    """This rank's part of a model. Updates write into the memory of the computation itself, so nothing is unpacked.

    Attributes:
        module: transformers' model; its linear layers are this rank's parts.
        config: transformers' config of the model.
        shards: slice and memory of every checkpoint tensor at this rank.
        dtype: dtype of the computation, and of held weights that are not block-fp8.
        block: size of the blocks of a block-fp8 checkpoint, or None.
        vocab_size: columns of the logits.
        whole_head: whether every rank computes all logits by itself (rank 0's count).
        places: places of the checkpoint's tensors in the module's.
        kept: contents of :attr:`tensors` in host memory while their own memory is released, or None.
    """

    module: Any
    config: Any
    shards: ShardMap
    dtype: torch.dtype
    block: BlockSize | None
    vocab_size: int
    whole_head: bool
    places: Mapping[str, Place]
    kept: list[torch.Tensor] | None = None
    _released: dict[int, torch.Size] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer of this rank by name. Tied tensors appear once, by their last name."""
        by_id = {id(tensor): (name, tensor) for name, tensor in self.module.state_dict(keep_vars=True).items()}
        return dict(by_id.values())

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self.named.values())

    def keep(self) -> None:
        """Keep the contents of :attr:`tensors` over a :meth:`release`. Weights on a CPU are not copied."""
        self.kept = [tensor.detach().to("cpu") for tensor in self.tensors]

    def release(self) -> int:
        """Free the memory of all :attr:`tensors` and return the number of bytes. Contents that were not kept are lost.

        The tensor objects stay, because ties and the shard map refer to these objects. :meth:`allocate` renews the
        shard map's views.
        """
        self._released = {id(tensor): tensor.shape for tensor in self.tensors}
        size = sum(tensor.nbytes for tensor in self.tensors if self.kept is None or not tensor.is_cpu)
        for shard in self.shards.shards.values():
            if id(shard.local) not in self._released:
                shard.local = shard.local.new_empty(0)
        for tensor in self.tensors:
            tensor.data = tensor.new_empty(0)
        return size

    def allocate(self) -> int:
        """Allocate the tensors again and return the number of bytes. Contents are the kept contents, else zeros.

        If memory runs out, no tensor gets any.
        """
        if self.kept is not None:
            pairs = zip(self.tensors, self.kept, strict=True)
            memory = [content.to(tensor.device) for tensor, content in pairs]
        else:
            memory = [tensor.new_zeros(self._released[id(tensor)]) for tensor in self.tensors]
        for tensor, data in zip(self.tensors, memory, strict=True):
            tensor.data = data
        for name, local in _locate(self.module, self.places).items():
            self.shards.shards[name].local = local
        return sum(tensor.nbytes for tensor in self.tensors)

    def shards_in(self, memory: Mapping[int, torch.Tensor]) -> ShardMap:
        """Return the shard map of other memory, given by the ids of the :attr:`tensors` to replace."""
        state = self.module.state_dict(keep_vars=True)
        located = {name: place.of(memory[id(state[place.source])]) for name, place in self.places.items()}
        shards = {name: replace(shard, local=located[name]) for name, shard in self.shards.shards.items()}
        return ShardMap(shards, self.shards.together)

    def finalize_load(self, load: Load) -> None:  # noqa: ARG002
        """Raise WEIGHTS_INCOMPLETE for scales that no source can have sent."""
        refuse_bad_scales(self.shards)

    @property
    def lossless(self) -> bool:
        """Whether the weights' dtype holds every tensor of the reference without loss."""
        return all(
            torch.promote_types(shard.local.dtype, shard.meta.dtype) == shard.local.dtype
            for shard in self.shards.shards.values()
        )

    @torch.inference_mode()
    def probe(self, device: torch.device) -> list[LayerShape]:
        """Return the storage of a token in each attention layer of this rank; all ranks together.

        Runs two tokens through the model. Raises UNSUPPORTED unless every layer calls attention. A layer of a different
        kind would keep state outside the KV cache.
        """
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        with recording(self.module.config) as shapes:
            try:
                self.module(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False)
            except (RlctlError, Broken):
                raise
            except Exception as error:
                raise _unsupported(
                    f"{type(self.module).__name__} cannot run over packed sequences: {_first_line(error)}"
                ) from error
        if sorted(shapes) != list(range(self.config.num_hidden_layers)):
            raise _unsupported(
                f"{type(self.module).__name__} has {self.config.num_hidden_layers} layers, "
                f"but {len(shapes)} asked for attention"
            )
        return [shapes[layer] for layer in sorted(shapes)]

    def check_identity(self, checkpoint: StoredWeights) -> None:
        """Raise CHECKPOINT_MISMATCH unless the checkpoint has this model's architecture."""
        other_config = read_config(checkpoint)
        different = [
            f"{name} is {getattr(other_config, name, None)!r} instead of {getattr(self.config, name, None)!r}"
            for name in _IDENTITY
            if getattr(other_config, name, None) != getattr(self.config, name, None)
        ]
        if (block := block_size_of(checkpoint.config)) != self.block:
            different.append(f"quantization_config is {block} instead of {self.block}")
        if different:
            raise Reason.CHECKPOINT_MISMATCH.error(
                f"{checkpoint.path} is of another architecture: {'; '.join(different)}", field="model_path"
            )


def refuse_bad_scales(shards: ShardMap) -> None:
    """Raise WEIGHTS_INCOMPLETE, with names, for scales that no source can have sent: zero, negative or not finite.

    A scale that was never written looks like that. With such a scale a whole block computes to zero or NaN.
    """
    scales = sorted(scales_of(shards.reference).values())
    invalid_names = [name for name in scales if not _are_scales(shards.shards[name].local)]
    if invalid_names:
        raise Reason.WEIGHTS_INCOMPLETE.error(
            f"{len(invalid_names)} tensors have values that are no scales: {', '.join(invalid_names[:5])}",
            metadata={"scales": "\n".join(invalid_names)},
        )


def read_config(checkpoint: StoredWeights) -> Any:
    """Read the checkpoint's config with transformers. Raises UNSUPPORTED for an unknown model."""
    try:
        return AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a config may break transformers in any way
        raise _unsupported(f"transformers cannot read the config of {checkpoint.path}: {_first_line(error)}") from error


def positions_of(config: Any) -> tuple[int | None, str]:
    """Return the longest sequence in tokens that can be computed, and the reason; None: no limit.

    A longrope model rotates all tokens of a sequence differently once the sequence exceeds the length of the first
    training. Here sequences of any length share a pass, and earlier entries of a sequence are not recomputed.
    """
    longest, cause = getattr(config, "max_position_embeddings", None), "the model's positions end at"
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for settings in (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))):
        first = settings.get("original_max_position_embeddings")
        if settings.get("rope_type") == "longrope" and first and (longest is None or first < longest):
            longest, cause = first, "and its longrope changes for sequences above"
    return longest, cause


def build(checkpoint: Checkpoint, dtype: str, ranks: Ranks, device: torch.device) -> Model:
    """Build this rank's part and load the checkpoint.

    ``dtype`` is "auto" or the name of a float dtype. Raises UNSUPPORTED (the architecture, or a cut over this number of
    ranks), CHECKPOINT_MISMATCH (names or shapes differ from the model's), CHECKPOINT_NOT_FOUND (a file is gone).
    """
    config = read_config(checkpoint)
    _check_architecture(config)
    block = block_size_of(checkpoint.config)
    weights_dtype = _held_dtype(dtype, config, checkpoint)
    module = _skeleton(config, weights_dtype)
    parts = checkpoint_parts(module, checkpoint.metas.keys())
    expected = _expected(module, parts, checkpoint)
    if block is not None:
        expected |= expected_scales(checkpoint.metas, block)
    compare(checkpoint.metas, expected, what=f"the checkpoint {checkpoint.path}")
    whole_head = True
    if ranks.size > 1:
        tensor_parallel.check_divisible(config, ranks.size)
        plan = _plan(module)
        styles = tensor_parallel.styles_of(module, plan)
        tied = set(module.all_tied_weights_keys) | set(module.all_tied_weights_keys.values())
        styles = {name: style for name, style in styles.items() if f"{name}.weight" not in tied}
        whole_head = "gather" not in styles.values()
        packed = tensor_parallel.cut(module, styles, plan, ranks)
        parts = checkpoint_parts(module, checkpoint.metas.keys())
        tensor_parallel.check_slices(module, {name: parts[name] for name in checkpoint.metas if name in parts}, packed)
    scales = hold_codes(module, parts, checkpoint.metas)
    places: dict[str, Place] = {name: scales.get(name) or parts[name] for name in checkpoint.metas}
    _materialise(module, device)
    shards = _shard_map(module, checkpoint, places, ranks)
    shards.load(checkpoint)
    if block is not None:
        compute_dequantised(module, parts, shards, block, weights_dtype)
    return Model(module, config, shards, weights_dtype, block, int(config.vocab_size), whole_head, places)


def _check_architecture(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(f"{config.model_type} is an encoder-decoder")
    if getattr(config, "is_causal", True) is False:
        raise _unsupported(f"{config.model_type} attends in both directions")
    unknown_kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS
    if unknown_kinds:
        raise _unsupported(f"{config.model_type} has layers of kind {', '.join(sorted(unknown_kinds))}")


def _held_dtype(name: str, config: Any, checkpoint: Checkpoint) -> torch.dtype:
    if name != "auto":
        return float_dtype(name, "dtype")
    if config.dtype in float_dtypes():
        return config.dtype  # type: ignore[no-any-return]
    floats = Counter(meta.dtype for meta in checkpoint.metas.values() if meta.dtype.is_floating_point)
    commonest = floats.most_common(1)[0][0] if floats else torch.float32
    return float_dtype(str(commonest), "dtype")


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    plain = copy.deepcopy(config)
    # Neither the form of held weights nor the choice of expert kernels is left to transformers. The plain
    # implementation takes experts in turn, and gives the same results on every machine.
    plain.quantization_config = None
    try:
        with _building, torch.device("meta"):
            module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                plain, dtype=dtype, attn_implementation=IMPLEMENTATION, experts_implementation="eager"
            )
    except Exception as error:  # a config may break this in any way too
        raise _unsupported(f"transformers builds no causal LM of {config.model_type}: {_first_line(error)}") from error
    if not getattr(module, "_supports_attention_backend", False):
        raise _unsupported(f"{type(module).__name__} does not use transformers' AttentionInterface")
    module.requires_grad_(False)
    return module.eval()


def _plan(module: Any) -> dict[str, str]:
    plan: dict[str, str] = dict(module.tp_plan or {})
    if not any(name.startswith(f"{module.base_model_prefix}.layers") for name in plan):
        raise _unsupported(f"{type(module).__name__} has no tensor-parallel plan", field="tp_size")
    return plan


def _expected(module: Any, parts: Mapping[str, Part], checkpoint: Checkpoint) -> dict[str, TensorMeta]:
    """Return the tensors that the checkpoint must hold: every parameter and persistent buffer.

    Of tensors that the config ties, at least one must be present; the rest may be absent.

    Raises CHECKPOINT_MISMATCH if tensors that the config ties have different values.
    """
    tied: dict[str, str] = module.all_tied_weights_keys
    state = module.state_dict()
    expected: dict[str, TensorMeta] = {}
    for name, part in parts.items():
        if name in tied and {name, tied[name]} <= checkpoint.metas.keys():
            _check_tied(checkpoint, name, tied[name])
        meta = checkpoint.metas.get(name)
        source = tied.get(name)
        aliases = [alias for alias, tied_source in tied.items() if tied_source == name]
        if meta is None and (source in checkpoint.metas or any(alias in checkpoint.metas for alias in aliases)):
            continue
        expected[name] = TensorMeta(name, meta.dtype if meta else state[part.source].dtype, part.shape)
    return expected


def _check_tied(checkpoint: Checkpoint, name: str, source: str) -> None:
    if not torch.equal(checkpoint.read(name), checkpoint.read(source)):
        raise Reason.CHECKPOINT_MISMATCH.error(
            f"the config of {checkpoint.path} ties {name} to {source}, but their values differ",
            field="model_path",
        )


def _materialise(module: Any, device: torch.device) -> None:
    """Allocate parameters and buffers, and compute the buffers that no checkpoint holds (rotary frequencies)."""
    module.to_empty(device=device)
    transient = [owner for owner in module.modules() if owner._non_persistent_buffers_set]
    for owner in transient:
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                buffer.fill_(float("nan"))
        module._init_weights(owner)
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is None or not buffer.is_floating_point() or bool(buffer.isnan().any()):
                raise _unsupported(f"{type(owner).__name__} has a buffer {name!r} that transformers does not recompute")
    module.tie_weights()


def _locate(module: Any, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    """Return the memory of this rank's part of every checkpoint tensor."""
    local = module.state_dict(keep_vars=True)
    return {name: place.of(local[place.source]) for name, place in places.items()}


def _shard_map(module: Any, checkpoint: Checkpoint, places: Mapping[str, Place], ranks: Ranks) -> ShardMap:
    shards = {
        name: Shard(checkpoint.metas[name], local, _slice(checkpoint.metas[name].shape, tuple(local.shape), ranks.rank))
        for name, local in _locate(module, places).items()
    }
    return ShardMap(shards, together=[(name, name + SCALE) for name in scales_of(checkpoint.metas)])


def _slice(full: tuple[int, ...], mine: tuple[int, ...], rank: int) -> Slice:
    """Return a rank's slice from the shapes: the rank-th part of the dimension that is cut, if any."""
    cut = [dim for dim, length in enumerate(mine) if length != full[dim]]
    return Slice(cut[0], rank * mine[cut[0]], mine[cut[0]]) if cut else Slice()


def _are_scales(tensor: torch.Tensor) -> bool:
    values = tensor.detach().to(torch.float32)
    return bool((values.isfinite() & (values > 0)).all())


def _unsupported(why: str, *, field: str = "model_path") -> RlctlError:
    return Reason.UNSUPPORTED.error(f"the torch engine cannot serve this model: {why}", field=field)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
