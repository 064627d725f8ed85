"""The trainer's side of the product's peers: the same bytes between the same processes, without rlctl."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlctl.transport import grpc
from tools.benchmark.weights.member import SERVICE, TIMEOUT

_CALL_S = 120.0


class Peers:
    """A plain torch.distributed group of this process, rank 0, and members."""

    def __init__(self, directory: Path, pids: Sequence[int]) -> None:
        """``directory``: with the TCP ports of the members with these process ids."""
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{(directory / str(pid)).read_text()}") for pid in pids]
        address = f"tcp://127.0.0.1:{_free_port()}"
        size = 1 + len(pids)
        joining = [self._send(c, "join", address=address, rank=r, world_size=size) for r, c in self._numbered()]
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=size, timeout=TIMEOUT)
        self._await(joining)

    def broadcast(self, flat: torch.Tensor) -> float:
        """Broadcast a flat uint8 tensor; return the seconds until every member has the tensor."""
        receiving = self._all("broadcast", nbytes=flat.nbytes)
        dist.barrier()
        started = time.perf_counter()
        dist.broadcast(flat, 0)
        dist.barrier()
        elapsed = time.perf_counter() - started
        self._await(receiving)
        return elapsed

    def one_by_one(self, tensors: Iterable[torch.Tensor]) -> float:
        """Send an RPC to each member and one broadcast for every tensor, each awaited; return seconds."""
        started = time.perf_counter()
        for tensor in tensors:
            receiving = self._all("receive", nbytes=tensor.nbytes)
            dist.broadcast(tensor, 0)
            self._await(receiving)
        return time.perf_counter() - started

    def load(self, path: Path) -> float:
        """Let all members load a safetensors file and copy its tensors into place; return the slowest seconds."""
        return max(float(seconds) for seconds in self._await(self._all("load", path=str(path))))

    def memcpy(self, nbytes: int) -> float:
        """Let all members copy memory at the same time; return the slowest seconds."""
        return max(float(seconds) for seconds in self._await(self._all("memcpy", nbytes=nbytes)))

    def watch(self) -> None:
        """Let all members record the times in which the product's own code receives and copies."""
        self._await(self._all("watch"))

    def watched(self) -> list[Any]:
        """Stop recording; return every member's spans of broadcasts and of copies."""
        return self._await(self._all("watched"))

    def close(self) -> None:
        """Leave the group."""
        self._await(self._all("leave"))
        dist.destroy_process_group()
        for channel in self._channels:
            channel.close()

    def _numbered(self) -> Iterable[tuple[int, grpc.Channel]]:
        return enumerate(self._channels, start=1)

    def _all(self, method: str, **arguments: Any) -> list[Any]:
        return [self._send(channel, method, **arguments) for channel in self._channels]

    def _send(self, channel: grpc.Channel, method: str, **arguments: Any) -> Any:
        call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
        return call.future(json.dumps(arguments).encode(), timeout=_CALL_S)

    def _await(self, calls: Sequence[Any]) -> list[Any]:
        return [json.loads(call.result()) for call in calls]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
