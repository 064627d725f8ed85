"""Which part of which checkpoint tensor one of vLLM's ranks computes with.

Reading goes back through what computes. A packed linear layer (on a CPU vLLM keeps nothing else of most of them) gives
its weight as the product with the identity matrix: products with 0 and 1 are exact.

Which part of a tensor a rank has follows from the shapes: vLLM cuts linear layers into equal runs along one dimension
(``model_executor/layers/linear.py``), and says of vocabularies, which it pads, where its rows begin
(``vocab_parallel_embedding.py``). It counts only where the digest of a checkpoint that is known comes out.
"""

from __future__ import annotations

from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.slices import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta


def part_of(layer: Any, leaf: str, part: int | None, meta: TensorMeta, rank: int, size: int) -> Shard:
    """What rank ``rank`` of ``size`` has of a tensor; ``part``: which of the tensors that the layer is fused of.

    On a device it is a view of the parameter, a packed layer's is a copy. Raises UNSUPPORTED for what cannot be read.
    """
    try:
        local = _weight(layer, leaf)
        if part is not None:
            sizes = [int(each) for each in layer.output_partition_sizes]
            local = local.narrow(0, sum(sizes[:part]), sizes[part])
        vocabulary = getattr(layer, "shard_indices", None)
        if vocabulary is not None:
            start, stop = int(vocabulary.org_vocab_start_index), int(vocabulary.org_vocab_end_index)
            return Shard(meta, local[: stop - start].detach(), Slice(0, start, stop - start))
    except (AttributeError, RuntimeError, ValueError, IndexError) as error:
        raise Reason.UNSUPPORTED.error(f"{meta.name} cannot be read back from vLLM: {error}") from error
    return Shard(meta, local.detach(), _slice(meta, tuple(local.shape), rank, size))


def _slice(meta: TensorMeta, shape: tuple[int, ...], rank: int, size: int) -> Slice:
    """Which part a rank's tensor of this shape is."""
    if shape == meta.shape:
        return Slice()
    cut = [dim for dim, (mine, full) in enumerate(zip(shape, meta.shape, strict=False)) if mine != full]
    if len(shape) == len(meta.shape) and len(cut) == 1 and shape[cut[0]]:
        length = shape[cut[0]]
        shares, rest = divmod(meta.shape[cut[0]], length)
        if not rest and size % shares == 0:
            # Where there are fewer heads of keys than ranks, several ranks have the same ones.
            return Slice(cut[0], rank * shares // size * length, length)
    raise Reason.UNSUPPORTED.error(f"vLLM holds {meta.name} with shape {shape} at rank {rank} of {size}")


def _weight(layer: Any, leaf: str) -> torch.Tensor:
    """A parameter as it is computed with."""
    held: torch.Tensor = getattr(layer, leaf)
    compute = getattr(layer, "cpu_linear", None)
    if leaf != "weight" or compute in (None, torch.nn.functional.linear):
        return held
    width = held.shape[1] if held.numel() else int(layer.input_size_per_partition)
    with torch.inference_mode():
        product: torch.Tensor = compute(torch.eye(width, dtype=held.dtype), held, None)
    return product.t().contiguous()
