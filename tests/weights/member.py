"""A member of a group in a process of its own: `python member.py ROLE PORT GROUP`."""

from __future__ import annotations

import datetime
import sys
import threading

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rlctl.weights.groups import join

VALUES = [0.0, 1.0, 2.0, 3.0, 4.0]


def sglang_group(port: int, rank: int, name: str) -> dist.ProcessGroup:
    """A group of two, made as SGLang's ``init_custom_process_group`` makes it."""
    timeout = datetime.timedelta(seconds=20)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        2, rank, [], "gloo", PrefixStore(name, store), group_name=name, backend_options=None, timeout=timeout
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def main(role: str, port: int, name: str) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if role == "sglang-source":
        group = sglang_group(port, 0, name)
        group.broadcast([torch.tensor(VALUES)], options).wait()
        dist.destroy_process_group(group)
    elif role == "sglang-receiver":
        group = sglang_group(port, 1, name)
        tensor = torch.zeros(len(VALUES))
        group.broadcast([tensor], options).wait()
        sys.stdout.write(f"{tensor.tolist()}\n")
        dist.destroy_process_group(group)
    else:
        member = join(("127.0.0.1", port), name=name, rank=1, world_size=2, timeout_s=20, broadcast_timeout_s=600)
        # The receiver gets one tensor of two.
        member.broadcast(torch.tensor(VALUES), src=1)
        if role == "sender-of-half":
            threading.Event().wait()
        elif role == "exits-while-receiving":
            receiving = threading.Thread(target=member.broadcast, args=(torch.zeros(1),), daemon=True)
            receiving.start()
            while not member.under_way:
                receiving.join(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
