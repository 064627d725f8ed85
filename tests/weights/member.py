"""A member of a group in a process of its own: `python member.py ROLE PORT GROUP`."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from rlctl.weights.group.process_group import join
from rlctl.weights.group.sender import send
from rlctl.weights.tensor.buckets import plan
from rlctl.weights.tensor.source import as_source

VALUES = [0.0, 1.0, 2.0, 3.0, 4.0]
MUCH = 1 << 26
"""Elements of a tensor that takes long enough to be in the middle of (256 MiB)."""


def sglang_group(port: int, rank: int, name: str, size: int = 2) -> dist.ProcessGroup:
    """A group made as SGLang's ``init_custom_process_group`` makes it."""
    timeout = datetime.timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], "gloo", PrefixStore(name, store), group_name=name, backend_options=None, timeout=timeout
    )
    _world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def take_in(group: dist.ProcessGroup, buckets: list[dict[str, Any]]) -> dict[str, str]:
    """What a receiver that knows names, dtypes and shapes makes of an update's broadcasts: SHA-256 over each tensor's
    bytes, by name. It is told nothing of rlctl's: one broadcast for each tensor in the order of the names, or one of
    bytes for a flattened bucket, in which they lie one after the other.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    found = {}
    for bucket in buckets:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            for dtype, shape in zip(bucket["dtypes"], bucket["shapes"], strict=True)
        ]
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        if bucket["flattened"]:
            packed = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8)
            group.broadcast([packed], options).wait()
            parts = list(packed.split([part.numel() for part in parts]))
        else:
            for tensor in tensors:
                group.broadcast([tensor], options).wait()
        found |= {
            name: hashlib.sha256(part.numpy().tobytes()).hexdigest()
            for name, part in zip(bucket["names"], parts, strict=True)
        }
    return found


def main(role: str, port: int, name: str) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if role == "sglang-source":
        group = sglang_group(port, 0, name)
        group.broadcast([torch.tensor(VALUES)], options).wait()
        dist.destroy_process_group(group)
    elif role == "sglang-updates":
        updates = json.loads(sys.stdin.read())
        group = sglang_group(port, 2, name, size=3)
        for buckets in updates:
            sys.stdout.write(json.dumps(take_in(group, buckets)) + "\n")
            sys.stdout.flush()  # it is read before the next update is sent
        dist.destroy_process_group(group)
    elif role == "sglang-receiver":
        group = sglang_group(port, 1, name)
        tensor = torch.zeros(len(VALUES))
        group.broadcast([tensor], options).wait()
        sys.stdout.write(f"{tensor.tolist()}\n")
        dist.destroy_process_group(group)
    elif role == "exits-while-joining":
        meet = functools.partial(join, ("127.0.0.1", port), name=name, rank=1, world_size=2, timeout_s=600)
        threading.Thread(target=meet, daemon=True).start()
        client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        while not any(f"{name}/" in key for key in client.list_keys()):
            time.sleep(0.01)
    elif role == "exits-while-sending":
        sender = join(("127.0.0.1", port), name=name, rank=0, world_size=2, timeout_s=20, broadcast_timeout_s=600)
        source = as_source([("much", torch.zeros(MUCH))])
        sending = threading.Thread(target=send, args=(source, plan(source.metas()), sender), daemon=True)
        sending.start()
        while not sender.under_way and sending.is_alive():
            sending.join(0.01)
    else:
        member = join(("127.0.0.1", port), name=name, rank=1, world_size=2, timeout_s=20, broadcast_timeout_s=600)
        if role == "forks":
            for leaves in (False, True):
                child = os.fork()
                if child == 0:
                    if leaves:
                        member.close()
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
        # The receiver gets one tensor of two.
        member.broadcast(torch.tensor(VALUES), src=1)
        while role == "sender-of-much":
            member.broadcast(torch.ones(MUCH), src=1)
        if role == "sender-of-half":
            threading.Event().wait()
        elif role == "exits-while-receiving":
            receiving = threading.Thread(target=member.broadcast, args=(torch.zeros(1),), daemon=True)
            receiving.start()
            while not member.under_way:
                receiving.join(0.01)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
