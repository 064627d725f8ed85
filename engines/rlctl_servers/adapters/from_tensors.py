"""Receive the tensors of an adapter from a trainer, and write them for the server as PEFT does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rlctl.v1.verbs_pb2 import AdapterConfig, UpdateWeightsFromTensorRequest, WeightsReport
from rlctl.weights.checkpoint.safetensors_file import header_of
from rlctl.weights.formats import lora
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.shard_map import Shard, ShardMap
from rlctl.weights.shared_memory import segment
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.tensor.placement import CPU
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, parse_dtype


class SentAdapter:
    """The tensors of one adapter, copied out of shared segments into memory of this process.

    Attributes:
        config: settings of the adapter.
        modules: layers that the adapter adds to.
    """

    def __init__(self, config: AdapterConfig, layers: Mapping[str, tuple[int, int]], update_id: str) -> None:
        """``layers``: see :func:`rlctl.weights.formats.lora.expected`. Raises as that function."""
        field = "adapter_config"
        dtype = parse_dtype(config.dtype, f"{field}.dtype")
        pairs = lora.expected(config, layers, field=field)
        metas = [TensorMeta(meta.name, dtype, meta.shape) for pair in pairs.values() for meta in pair]
        self.config = config
        self.modules = list(pairs)
        self._shards = ShardMap({meta.name: Shard(meta, torch.empty(meta.shape, dtype=dtype)) for meta in metas})
        self._receiver = Receiver(self._shards)
        self._receiver.begin(update_id)
        self._reader = SegmentReader(torch.device(CPU))

    @property
    def missing(self) -> list[str]:
        """Return the names of the tensors that have not arrived."""
        return self._receiver.incomplete()

    def take(self, request: UpdateWeightsFromTensorRequest) -> WeightsReport:
        """Copy tensors out of segments. Raises as :meth:`SegmentReader.check` and :meth:`SegmentReader.read` do."""
        segments = [segment.from_proto(message, f"segments[{i}]") for i, message in enumerate(request.segments)]
        stats = self._reader.read(self._reader.check(segments, self._receiver), self._receiver)
        return WeightsReport(tensors=stats.tensors, bytes_received=stats.bytes_received)

    def save(self, directory: Path) -> None:
        """Write the adapter as PEFT does. Raises OSError, and FIELD_INVALID for a dtype that files do not have."""
        (directory / lora.CONFIG).write_text(json.dumps(lora.to_peft(self.config)))
        with (directory / lora.TENSORS).open("wb") as file:
            file.write(header_of(list(self._shards.reference.values())))
            for shard in self._shards.shards.values():
                file.write(as_bytes(shard.local).numpy().data)

    def close(self) -> None:
        self._reader.close()
