"""A fake inside of vLLM: its own NCCL weight transfer engine, with gloo in NCCL's place. A plug-in of vLLM's.

What is called, unpacked and loaded is vLLM's code. What is not: how ranks meet (the "unique id" says where), how bytes
go, and streams. As with NCCL, a rank whose source has left stays in the broadcast.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import time
import types
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore


class Group:
    """What is asked of a PyNcclCommunicator."""

    def __init__(self, unique_id: bytes, rank: int, size: int) -> None:
        host, port, name = unique_id.rstrip(b"\0").decode().split(" ")
        store: Any = TCPStore(host, int(port), size, False, wait_for_workers=False)
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        gloo: Any = dist.ProcessGroupGloo
        self._group = gloo(store, rank, size, datetime.timedelta(hours=1))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        try:
            self._group.broadcast([tensor], options).wait()
        except RuntimeError:
            while True:
                time.sleep(1)

    def destroy(self) -> None:
        self._group = None


def engine() -> type:
    """The engine, made when vLLM makes one."""
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    stream = types.SimpleNamespace(synchronize=lambda: None)
    packed_tensor._get_streams = lambda _device, number: (stream,) * number
    packed_tensor.torch = types.SimpleNamespace(
        empty=torch.empty,
        uint8=torch.uint8,
        accelerator=types.SimpleNamespace(current_device_index=lambda: 0),
        cuda=types.SimpleNamespace(stream=lambda _: contextlib.nullcontext()),
    )

    class ByGloo(NCCLWeightTransferEngine):  # type: ignore[misc]
        def init_transfer_engine(self, info: Any) -> None:
            self.packed, self.packed_num_buffers = info.packed, info.packed_num_buffers
            self.packed_buffer_size_bytes = info.packed_buffer_size_bytes
            rank = self.parallel_config.rank
            self.model_update_group = Group(info.nccl_unique_id_bytes, rank + info.rank_offset, info.world_size)

        def update_weights(self, info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(info))  # without a device to wait for
            fails = pathlib.Path(os.environ["FAILS"])
            if fails.exists():
                size, rank, name = fails.read_text().split()
                here = (int(size), int(rank)) == (self.parallel_config.world_size, self.parallel_config.rank)
                if here and name in info["names"]:
                    raise RuntimeError("this rank was to fail")

    return ByGloo


def register() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory._registry["nccl"] = engine
