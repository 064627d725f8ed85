"""The parts of checkpoint tensors that a rank of vLLM computes with.

Reading goes back through the computation. A packed linear layer (on a CPU vLLM keeps nothing else of most layers) gives
its weight as the product with the identity matrix: products with 0 and 1 are exact.

A rank's part of a tensor follows from the shapes. vLLM cuts linear layers into equal runs along one dimension
(``model_executor/layers/linear.py``), and reports where the rows of padded vocabularies begin
(``vocab_parallel_embedding.py``). A part counts only if the parts give the digest of a known checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.slices import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta


def part_of(layer: Any, leaf: str, part: int | None, meta: TensorMeta, rank: int, size: int) -> Shard:
    """Return a tensor's part at rank ``rank`` of ``size``. ``part``: number of the tensor in a fused layer, or None.

    On a device the part is a view of the parameter; the part of a packed layer is a copy. Raises UNSUPPORTED for a part
    that cannot be read.
    """
    try:
        local = _weight(layer, leaf)
        if part is not None:
            sizes = [int(partition_size) for partition_size in layer.output_partition_sizes]
            local = local.narrow(0, sum(sizes[:part]), sizes[part])
        vocabulary = getattr(layer, "shard_indices", None)
        if vocabulary is not None:
            start, stop = int(vocabulary.org_vocab_start_index), int(vocabulary.org_vocab_end_index)
            return Shard(meta, local[: stop - start].detach(), Slice(0, start, stop - start))
    except (AttributeError, RuntimeError, ValueError, IndexError) as error:
        raise Reason.UNSUPPORTED.error(f"{meta.name} cannot be read back from vLLM: {error}") from error
    return Shard(meta, local.detach(), _slice(meta, tuple(local.shape), rank, size))


def _slice(meta: TensorMeta, shape: tuple[int, ...], rank: int, size: int) -> Slice:
    """Return the slice of a rank's tensor, given its shape."""
    if shape == meta.shape:
        return Slice()
    cut = [
        dim for dim, (part_size, full_size) in enumerate(zip(shape, meta.shape, strict=False)) if part_size != full_size
    ]
    if len(shape) == len(meta.shape) and len(cut) == 1 and shape[cut[0]]:
        length = shape[cut[0]]
        shares, remainder = divmod(meta.shape[cut[0]], length)
        if not remainder and size % shares == 0:
            # With fewer heads of keys than ranks, several ranks have the same heads.
            return Slice(cut[0], rank * shares // size * length, length)
    raise Reason.UNSUPPORTED.error(f"vLLM holds {meta.name} with shape {shape} at rank {rank} of {size}")


def _weight(layer: Any, leaf: str) -> torch.Tensor:
    """Return a parameter in the form of the computation."""
    weight: torch.Tensor = getattr(layer, leaf)
    compute = getattr(layer, "cpu_linear", None)
    if leaf != "weight" or compute in (None, torch.nn.functional.linear):
        return weight
    width = weight.shape[1] if weight.numel() else int(layer.input_size_per_partition)
    with torch.inference_mode():
        product: torch.Tensor = compute(torch.eye(width, dtype=weight.dtype), weight, None)
    return product.t().contiguous()
