"""An adapter whose tensors a trainer sends: taken in here, and handed to the server as the files that PEFT writes."""

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
    """The tensors of one adapter, as they come out of shared segments into memory of this process.

    Attributes:
        config: what the adapter is.
        modules: layers that it adds to.
    """

    def __init__(self, config: AdapterConfig, layers: Mapping[str, tuple[int, int]], update_id: str) -> None:
        """``layers``: as :func:`rlctl.weights.formats.lora.expected` takes them, and raises about them."""
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
        """Names of the tensors that have not come."""
        return self._receiver.incomplete()

    def take(self, request: UpdateWeightsFromTensorRequest) -> WeightsReport:
        """Copy tensors out of segments. Raises as :meth:`SegmentReader.check` and :meth:`SegmentReader.read` do."""
        told = [segment.from_proto(message, f"segments[{i}]") for i, message in enumerate(request.segments)]
        stats = self._reader.read(self._reader.check(told, self._receiver), self._receiver)
        return WeightsReport(tensors=stats.tensors, bytes_received=stats.bytes_received)

    def save(self, directory: Path) -> None:
        """Write it as PEFT does. Raises FIELD_INVALID for a dtype that files do not have, OSError."""
        config = {
            "peft_type": "LORA",
            "r": self.config.lora_rank,
            "lora_alpha": self.config.lora_alpha,
            "target_modules": list(self.config.target_modules),
            "use_rslora": self.config.rslora,
            "bias": "none",
        }
        (directory / lora.CONFIG).write_text(json.dumps(config))
        with (directory / lora.TENSORS).open("wb") as file:
            file.write(header_of(list(self._shards.reference.values())))
            for shard in self._shards.shards.values():
                file.write(as_bytes(shard.local).numpy().data)

    def close(self) -> None:
        """Let go of what is mapped."""
        self._reader.close()
