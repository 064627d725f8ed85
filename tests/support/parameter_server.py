"""checkpoint-engine's ``ParameterServer`` on a CPU, one for each rank, in the order of its ``_update_per_bucket``.

    python parameter_server.py CHECKPOINT OUTPUT SEED ENGINE=RANKS [ENGINE=RANKS ...]

The script needs torch and safetensors, and nothing of rlctl. The sockets are pyzmq's; without pyzmq, a REQ socket of
this file. The last line is JSON: the error at each parameter server, and the answer of each engine. The environment
variable FAULT causes a fault: ``tensor`` lists an unknown tensor, ``pickle`` sends a function in place of a list.

The original runs on GPUs only. Differences: the ranks are threads with a barrier in place of the process group. The
buffer is in shared memory, with a reference count for each reading.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import socket as sockets
import struct
import sys
import threading
import urllib.error
import urllib.request
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import reduce_tensor

torch.multiprocessing.set_sharing_strategy("file_system")

ALIGN = 256
BUCKET_BYTES = 512 << 10
COUNTER = os.getpid()


class Requests:
    """A REQ socket with one peer, with the functions of a parameter server."""

    def __init__(self, name: str) -> None:
        self._listening = sockets.socket(sockets.AF_UNIX)
        self._listening.bind("\0" + name)
        self._listening.listen()
        self._peer: Any = None

    def _connected(self) -> Any:
        if self._peer is None:
            peer, _ = self._listening.accept()
            self._peer = peer.makefile("rwb")
            self._peer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ" + b"\x08Identity" + bytes(4)
            self._peer.write(bytes([4, len(ready)]) + ready)
            self._peer.flush()
            assert self._peer.read(64)[:10] == b"\xff" + bytes(8) + b"\x7f"
            assert self._frame()[1].startswith(b"\x05READY")
        return self._peer

    def _frame(self) -> tuple[int, bytes]:
        [flags] = self._peer.read(1)
        size = int.from_bytes(self._peer.read(8 if flags & 2 else 1))
        return flags, self._peer.read(size)

    def send(self, data: bytes) -> None:
        peer = self._connected()
        head = bytes([0, len(data)]) if len(data) < 256 else b"\x02" + struct.pack(">Q", len(data))
        peer.write(b"\x01\x00" + head + data)
        peer.flush()

    def recv(self) -> bytes:
        assert self._frame() == (1, b"")
        return self._frame()[1]

    def close(self) -> None:
        self._listening.close()


def bound(name: str) -> Any:
    """Return a REQ socket at an abstract name."""
    try:
        import zmq
    except ImportError:
        return Requests(name)
    made = zmq.Context.instance().socket(zmq.REQ)
    made.bind(f"ipc://@{name}")
    return made


def shared(value: Any) -> bytes:
    """Return a pickle with storages by handle, as plain pickles of GPU storages."""
    stream = io.BytesIO()
    ForkingPickler(stream).dump(value)
    return stream.getvalue()


def aligned(tensor: torch.Tensor) -> int:
    return (tensor.nbytes + ALIGN - 1) // ALIGN * ALIGN


def buckets(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    made: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        if made[-1] and sum(map(aligned, made[-1].values())) + aligned(tensor) > BUCKET_BYTES:
            made.append({})
        made[-1][name] = tensor
    return made


def to_named_tensor(bucket: dict[str, torch.Tensor], offset: int) -> list[dict[str, Any]]:
    made = []
    for name, tensor in bucket.items():
        made.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": offset})
        offset += aligned(tensor)
    return made


class Servers:
    """The parameter servers of all ranks of all engines."""

    def __init__(self, places: dict[str, int], tensors: dict[str, torch.Tensor]) -> None:
        self._places = places
        self._ranks = [(url, rank) for url, ranks in places.items() for rank in range(ranks)]
        self._group = threading.Barrier(len(self._ranks), timeout=60)
        self._buckets = buckets(tensors)
        self.errors: list[str] = [""] * len(self._ranks)
        self.answers: dict[str, Any] = {}

    def update(self) -> None:
        threads = [threading.Thread(target=self._update, args=(index,)) for index in range(len(self._ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _name(self, index: int) -> str:
        return f"checkpoint-engine-GPU-{index}-{COUNTER}.sock"

    def _request(self, url: str) -> None:
        """Send the request of SGLang's ``update.py`` to the engine of this rank."""
        indices = [index for index, (place, _) in enumerate(self._ranks) if place == url]
        handles = {f"GPU-{index}": f"ipc://@{self._name(index)}" for index in indices}
        body = {"zmq_handles": handles, "flush_cache": True, "weight_version": os.environ.get("VERSION")}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/update_weights_from_ipc", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self.answers[url] = [answer.status, json.loads(answer.read())]
        except urllib.error.HTTPError as error:
            self.answers[url] = [error.code, json.loads(error.read())]

    def _update(self, index: int) -> None:
        url, rank = self._ranks[index]
        largest = max(sum(map(aligned, bucket.values())) for bucket in self._buckets)
        buffer = torch.empty(2 * largest, dtype=torch.uint8)
        socket = bound(self._name(index))
        requesting = threading.Thread(target=self._request if rank == 0 else lambda _: None, args=(url,))
        requesting.start()
        try:
            socket.send(shared(reduce_tensor(buffer)))
            for number, bucket in enumerate(self._buckets):
                start = offset = number % 2 * largest
                for tensor in bucket.values():
                    buffer[offset : offset + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
                    offset += aligned(tensor)
                self._group.wait()
                self.errors[index] = socket.recv().decode() or self.errors[index]
                self._group.wait()
                if any(self.errors):
                    socket.send(pickle.dumps(RuntimeError("Some workers failed to update weights"), -1))
                    return
                if number:
                    buffer.untyped_storage()._shared_incref()
                listed: Any = to_named_tensor(bucket, start)
                if os.environ.get("FAULT") == "tensor" and number == 1:
                    listed[0]["name"] = "no.such.weight"
                if os.environ.get("FAULT") == "pickle":
                    listed = os.getpid
                socket.send(pickle.dumps(listed, -1))
            self.errors[index] = socket.recv().decode()
            socket.send(pickle.dumps(None, -1))
            socket.recv()
            del buffer
            socket.send(pickle.dumps(None, -1))
            socket.recv()
        finally:
            requesting.join()
            socket.close()


def main(checkpoint: str, output: str, seed: str, *places: str) -> None:
    generator = torch.Generator().manual_seed(int(seed))
    changed = {
        name: tensor + (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)
        for name, tensor in load_file(f"{checkpoint}/model.safetensors").items()
    }
    save_file(changed, f"{output}/{seed}.safetensors")
    servers = Servers({url: int(ranks) for url, _, ranks in (place.rpartition("=") for place in places)}, changed)
    servers.update()
    left = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    report = {"errors": servers.errors, "answers": servers.answers, "left": left, "buckets": len(servers._buckets)}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
