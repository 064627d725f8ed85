"""The trainer's half of vLLM's NCCL weight transfer, over a torch process group that an rlctl fleet's ranks can join.

Names and wire as vLLM has them (``vllm/distributed/weight_transfer``): a trainer imports them from here instead. vLLM's
own communicator is a PyNccl one, which no torch process group can share; the rest of its protocol is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from rlctl.weights.groups import WeightGroup, join

GROUP = "weight_transfer"
"""vLLM's groups have no name; the gateway's dialect gives them this one."""

PACKED_BYTES = 1 << 30
TIMEOUT_S = 300.0

_stores: dict[int, TCPStore] = {}
"""By port, while the process lives: the engines' ranks meet there."""


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How tensors are sent; ``src`` is always 0 here."""

    group: WeightGroup
    src: int = 0
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2


def trainer_init(init_info: Any, rank: int = 0) -> WeightGroup:
    """The group of rank 0, whose store listens at ``master_address:master_port``; returns when all have come.

    ``init_info``: a mapping or a dataclass with those and ``world_size``. NCCL where torch has it and a GPU is there,
    else gloo: what the gateway forms with where a request names no backend. Raises GROUP_FAILED.
    """
    del rank
    info = asdict(init_info) if is_dataclass(init_info) and not isinstance(init_info, type) else dict(init_info)
    host, port, world_size = info["master_address"], int(info["master_port"]), int(info["world_size"])
    if port not in _stores:
        _stores[port] = TCPStore(host, port, world_size, is_master=True, wait_for_workers=False)
    nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return join(
        (host, port),
        name=GROUP,
        rank=0,
        world_size=world_size,
        backend="nccl" if nccl else "gloo",
        timeout_s=TIMEOUT_S,
        interface_host=host,
    )


def packed_nccl_broadcast_producer(
    iterator: Iterable[tuple[str, torch.Tensor]],
    group: WeightGroup,
    src: int = 0,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None,
    buffer_size_bytes: int = PACKED_BYTES,
    num_buffers: int = 2,
) -> None:
    """Send tensors' bytes together: a broadcast ends with the tensor that takes it above ``buffer_size_bytes``."""
    del src, num_buffers
    pack: list[torch.Tensor] = []
    for item in iterator:
        tensor = post_iter_func(item) if post_iter_func is not None else item[1]
        pack.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        if sum(part.numel() for part in pack) > buffer_size_bytes:
            group.broadcast(torch.cat(pack))
            pack = []
    if pack:
        group.broadcast(torch.cat(pack))


class NCCLWeightTransferEngine:
    """What trainers call of it."""

    trainer_init = staticmethod(trainer_init)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: NCCLTrainerSendWeightsArgs | Mapping[str, Any]
    ) -> None:
        """Send all tensors, packed or one by one; ``update_info`` must say which."""
        given = trainer_args
        args = given if isinstance(given, NCCLTrainerSendWeightsArgs) else NCCLTrainerSendWeightsArgs(**given)
        if args.packed:
            packed_nccl_broadcast_producer(
                iterator,
                args.group,
                post_iter_func=args.post_iter_func,
                buffer_size_bytes=args.packed_buffer_size_bytes,
            )
            return
        for item in iterator:
            tensor = args.post_iter_func(item) if args.post_iter_func is not None else item[1]
            args.group.broadcast(tensor.detach().contiguous())
