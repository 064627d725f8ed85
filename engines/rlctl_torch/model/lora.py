"""LoRA adapters of a rank: held beside the model, cut like its layers, added for the tokens of their requests.

In a layer cut by outputs, B is cut; in a layer cut by inputs, A is cut. The layer's own sum over the ranks then
includes the adapter's part. Tensors are held in the received dtype, for digests, and are cast once to the dtype of the
computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from rlctl.contract.adapter_identity import scale_of
from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import Adapter, AdapterConfig
from rlctl.weights.checkpoint.checkpoint import compare
from rlctl.weights.formats import lora
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice
from rlctl.weights.tensor.checkpoint_names import Part
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_torch.model.model import Model
from rlctl_torch.model.tensor_parallel import CutLinear
from rlctl_torch.steps.step_plan import Batch

WITHOUT = 0
"""Number of a sequence without an adapter, in a batch."""


@dataclass
class LoraAdapter:
    """An adapter, staged or loaded.

    Attributes:
        info: description of the adapter for callers.
        scale: factor of ``B @ A``.
        shards: this rank's parts of the tensors, in the received dtype.
        number: number of the adapter in step plans, the same on every rank. 0 while the adapter is only staged.
    """

    info: Adapter
    scale: float
    shards: ShardMap
    number: int = WITHOUT
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Adapters:
    """Loaded adapters of a rank. The engine thread makes all changes; any thread may read ``loaded``."""

    def __init__(self, model: Model) -> None:
        self.loaded: Mapping[str, LoraAdapter] = {}
        """Adapters by name. The mapping is replaced, never changed."""
        self._model = model
        self._weights = _weights(model)
        self._layers = _layers(model, self._weights)
        self._deltas: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor, float]]] = {}
        self._last = WITHOUT
        self._parts: list[tuple[int, torch.Tensor | None]] = []

    def stage(
        self, info: Adapter, config: AdapterConfig, metas: Mapping[str, TensorMeta], *, what: str, field: str
    ) -> LoraAdapter:
        """Allocate memory for the tensors of an adapter. Running requests are not affected.

        Raises FIELD_INVALID, UNSUPPORTED, or CHECKPOINT_MISMATCH (unknown layers, or tensors that differ from the
        config's).
        """
        expected, slices = self._expected(config, field)
        compare(metas, expected, what=what)
        device = self._model.tensors[0].device
        shards = {
            name: Shard(
                meta, torch.empty(slices[name].shape(meta.shape), dtype=meta.dtype, device=device), slices[name]
            )
            for name, meta in metas.items()
        }
        adapter = Adapter()
        adapter.CopyFrom(info)
        adapter.lora_rank, adapter.scale = config.lora_rank, scale_of(config)
        pairs = [lora.names_of(module) for module in lora.targets(config, self._layers, field=field)]
        return LoraAdapter(adapter, adapter.scale, ShardMap(shards, together=pairs))

    def wire(self, config: AdapterConfig, dtype: torch.dtype, field: str) -> dict[str, TensorMeta]:
        """Return the tensors of an adapter with this config, all in ``dtype``. Raises as :meth:`stage`."""
        expected, _ = self._expected(config, field)
        return {name: TensorMeta(name, dtype, meta.shape) for name, meta in expected.items()}

    def put(self, adapter: LoraAdapter) -> None:
        """Load an adapter and replace the loaded adapter of its name, on all ranks in the same order."""
        self.drop(adapter.info.name)
        self._last += 1
        adapter.number = self._last
        for module, layer in self._layers.items():
            a, b = (adapter.shards.shards.get(name) for name in lora.names_of(module))
            if a is not None and b is not None:
                pair = (a.local.to(self._model.dtype), b.local.to(self._model.dtype), adapter.scale)
                if module not in self._deltas:
                    self._attach(module, layer)
                self._deltas[module][adapter.number] = pair
        self.loaded = {**self.loaded, adapter.info.name: adapter}

    def drop(self, name: str) -> None:
        """Forget the adapter of this name, if it is loaded."""
        removed = self.loaded.get(name)
        if removed is None:
            return
        self.loaded = {other: adapter for other, adapter in self.loaded.items() if other != name}
        for deltas in self._deltas.values():
            deltas.pop(removed.number, None)

    def find(self, name: str, field: str) -> LoraAdapter:
        """Return the loaded adapter of this name. Raises ADAPTER_NOT_FOUND."""
        adapter = self.loaded.get(name)
        if adapter is None:
            names = ", ".join(sorted(self.loaded)) or "none"
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {name!r} is loaded; there are: {names}", field=field)
        return adapter

    @contextlib.contextmanager
    def applying(self, batch: Batch) -> Iterator[None]:
        """Apply the adapters of this batch to the forward passes inside the block."""
        numbers = set(batch.adapters) - {WITHOUT}
        if numbers:
            adapter_numbers = torch.repeat_interleave(torch.tensor(batch.adapters), torch.tensor(batch.lengths))
            device = self._model.tensors[0].device
            for number in sorted(numbers):
                tokens = (adapter_numbers == number).nonzero()[:, 0].to(device)
                self._parts.append((number, None if len(tokens) == len(adapter_numbers) else tokens))
        try:
            yield
        finally:
            self._parts = []

    def _attach(self, module: str, layer: nn.Linear) -> None:
        deltas = self._deltas[module] = {}

        def add(input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            """Add the adapters' part of ``[..., in]`` to ``[..., out]``, in place. Tokens are in batch order."""
            for number, tokens in self._parts:
                pair = deltas.get(number)
                if pair is None:
                    continue
                a, b, scale = pair
                flat = input.reshape(-1, input.shape[-1])
                hidden = flat if tokens is None else flat[tokens]
                delta = nn.functional.linear(nn.functional.linear(hidden, a) * scale, b)
                rows = out.view(-1, out.shape[-1])
                if tokens is None:
                    rows += delta
                else:
                    rows.index_add_(0, tokens, delta)
            return out

        if isinstance(layer, CutLinear):
            layer.adapt = add
        else:
            layer.register_forward_hook(lambda _, inputs, out: add(inputs[0], out))

    def _expected(self, config: AdapterConfig, field: str) -> tuple[dict[str, TensorMeta], dict[str, Slice]]:
        """Return names and shapes of the adapter's tensors, and this rank's slice of each tensor."""
        metas: dict[str, TensorMeta] = {}
        slices: dict[str, Slice] = {}
        weights = {module: self._model.shards.shards[self._weights[module]] for module in self._layers}
        sizes = {module: (weight.meta.shape[0], weight.meta.shape[1]) for module, weight in weights.items()}
        for module, (a, b) in lora.expected(config, sizes, field=field).items():
            metas |= {a.name: a, b.name: b}
            cut = weights[module].slice
            slices[a.name] = cut if cut.dim == 1 else Slice()
            slices[b.name] = cut if cut.dim == 0 else Slice()
        return metas, slices


def _weights(model: Model) -> dict[str, str]:
    """Return the checkpoint name of the weight, by module, for every module whose weight is a single tensor there."""
    shared: dict[str, list[str]] = {}
    for name, place in model.places.items():
        if isinstance(place, Part) and place.source.endswith(".weight"):
            shared.setdefault(place.source.removesuffix(".weight"), []).append(name)
    return {module: names[0] for module, names in shared.items() if len(names) == 1}


def _layers(model: Model, weights: Mapping[str, str]) -> dict[str, nn.Linear]:
    """Return the linear layers to which adapters can add.

    The output head is excluded, because the head sees only the tokens that are sampled from. Experts are excluded,
    because an expert sees only its own tokens.
    """
    head = model.module.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.module.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head and name in weights and ".experts." not in name
    }
