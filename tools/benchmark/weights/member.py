"""An rlctl server with the peers' work in the same process: ``python -m tools.benchmark.weights.member ARGUMENTS``.

A peer's figure has meaning only between the same processes on the same cores. The engines' ranks of a benchmark
therefore run this module in place of ``rlctl``: the same server, and beside it a service. On request, the service joins
an ordinary torch.distributed group, receives plain broadcasts, or loads a checkpoint with safetensors.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rlctl.runtime.event_loops import LoopThread
from rlctl.transport import grpc

DIRECTORY = "RLCTL_BENCH_MEMBERS"
"""Environment variable: directory in which every member writes its service's TCP port, in a file named by its pid."""

SERVICE = "tools.benchmark.Member"

TIMEOUT = datetime.timedelta(seconds=120)

Job = Callable[..., Any]

_servers: list[grpc.aio.Server] = []
"""Kept until the process ends: a collected server stops."""


class Member:
    """The work of a rank's process as a member of the peers' group. torch is loaded with the first job."""

    def __init__(self) -> None:
        self._buffer: Any = None
        self._memcpy: Any = None
        self._watch: Any = None

    def join(self, address: str, rank: int, world_size: int) -> None:
        """Join the default process group of torch.distributed."""
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size, timeout=TIMEOUT)

    def leave(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()
        self._buffer = None

    def broadcast(self, nbytes: int) -> None:
        """Receive a flat buffer."""
        import torch.distributed as dist

        buffer = self._room(nbytes)
        dist.barrier()
        dist.broadcast(buffer, 0)
        dist.barrier()

    def receive(self, nbytes: int) -> None:
        """Receive a tensor."""
        import torch.distributed as dist

        dist.broadcast(self._room(nbytes), 0)

    def load(self, path: str) -> float:
        """Load a safetensors file and copy every tensor into existing memory; return the seconds."""
        from safetensors.torch import load_file

        room = self._room(Path(path).stat().st_size)
        started = time.perf_counter()
        end = 0
        for tensor in load_file(path).values():
            target = room[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            end += tensor.nbytes
        return time.perf_counter() - started

    def memcpy(self, nbytes: int) -> float:
        """Copy memory that was written before; return the seconds."""
        from tools.benchmark.weights.copies import Memcpy

        if self._memcpy is None or self._memcpy.nbytes != nbytes:
            self._memcpy = Memcpy(nbytes)
        return self._memcpy.run()  # type: ignore[no-any-return]

    def watch(self) -> None:
        """Start to record the times in which the product's own code receives and copies."""
        from tools.benchmark.weights.collectives import Watch

        self._watch = Watch()

    def watched(self) -> Any:
        """Stop recording; return the spans of broadcasts and of copies."""
        self._watch.end()
        return self._watch.broadcasts, self._watch.copies

    def _room(self, nbytes: int) -> Any:
        """Return memory that was written before: otherwise the peer's time would include the first touch."""
        import torch

        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = torch.ones(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]


def serve(directory: Path) -> LoopThread:
    """Serve on a separate thread; write the TCP port into ``directory``."""
    loop = LoopThread("bench member")
    port = loop.call(_start(Member()))
    (directory / str(os.getpid())).write_text(str(port))
    return loop


async def _start(member: Member) -> int:
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(_answering(getattr(member, name)))
        for name in ("join", "leave", "broadcast", "receive", "load", "memcpy", "watch", "watched")
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _servers.append(server)
    return port


def _answering(job: Job) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def answer(request: bytes, _: Any) -> bytes:
        return json.dumps(await asyncio.to_thread(job, **json.loads(request))).encode()

    return answer


def main() -> None:
    """Serve the member and the rlctl server."""
    from rlctl.cli.main import main as rlctl_main

    serving = serve(Path(os.environ[DIRECTORY]))
    rlctl_main()
    del serving


if __name__ == "__main__":
    main()
