"""What lets vLLM's own NCCL engine be driven on a CPU: gloo stands in, at vLLM (gloo_in_vllm.py) and at the source.

``python -m native_stand_in ARGUMENTS`` is an rlctl process whose plug-in takes a CPU for a place where that engine
works; ``python -m native_stand_in --train ENDPOINT CHECKPOINT`` a trainer that stops in the middle of an update.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from interrupted_weights import Interrupted
from plain_server import Plain
from rlctl_vllm.updates import native_nccl
from torch._C._distributed_c10d import TCPStore

from rlctl.contract.vllm_groups import unique_id_key
from rlctl.engine import EngineConfig
from rlctl.runtime.event_loops import LoopThread
from rlctl.trainer import publisher as publishing
from rlctl.trainer import source_rank
from rlctl.weights.group.rendezvous import Forming, Member
from rlctl.weights.group.vllm_nccl import UNIQUE_ID_BYTES, VLLMGroup


class WithEngine(Plain):
    """A server on a port, without the extension, whose own NCCL engine is gloo's."""

    def command(self) -> Sequence[str]:
        return [*super().command(), "--weight-transfer-config", '{"backend": "nccl"}']


def plug_in(place: Path, module: str = "gloo_in_vllm") -> Path:
    """A directory for the server's PYTHONPATH that has the plug-in, and nothing else of these tests."""
    information = place / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:register\n")
    (place / f"{module}.py").symlink_to(Path(__file__).with_name(f"{module}.py"))
    return place


@contextlib.contextmanager
def native_server(checkpoint: Path, place: Path, ranks: int) -> Iterator[str]:
    """URL of a server. The file ``fails`` in ``place`` says at which rank a load fails."""
    loop = LoopThread("native")
    server = WithEngine(EngineConfig(str(checkpoint), dtype="float32", tp_size=ranks))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(plug_in(place / f"plug-in-{ranks}")), prepend=os.pathsep)
            patch.setenv("FAILS", str(place / "fails"))
            loop.submit(server.start(lambda error: None)).result(400)
        yield server.http.url
    finally:
        loop.submit(server.stop()).result(60)
        loop.stop()


def join_by_gloo(
    store: tuple[str, int],
    *,
    name: str,
    world_size: int,
    timeout_s: float,
    broadcast_timeout_s: float,
    interface_host: str,
    stop: threading.Event,
) -> VLLMGroup:
    """In place of :func:`rlctl.weights.group.vllm_nccl.join_vllm`."""
    told: Any = f"{store[0]} {store[1]} {name}".encode().ljust(UNIQUE_ID_BYTES, b"\0")
    TCPStore(*store, None, False, wait_for_workers=False).set(unique_id_key(name), told)
    member = Member(name, 0, world_size, "gloo", interface_host, broadcast_timeout_s)
    Forming(member, store).run(timeout_s, stop)
    return VLLMGroup(member, "cpu")


def train(endpoint: str, checkpoint: str) -> None:
    from transformers import AutoModelForCausalLM

    from rlctl.sdk.blocking import connect

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    publishing.LEASE_TTL_S = 8.0  # it dies, and who waits for that should not wait for long

    def stop() -> None:
        sys.stdout.write("in the middle\n")
        sys.stdout.flush()
        time.sleep(600)

    with connect(endpoint) as fleet:
        publisher = fleet.publisher("actor", backend=["vllm_nccl", "gloo"], bucket_bytes=16 << 10)
        publisher.update(Interrupted(model, stop), version="never", quorum=2)


def main() -> None:
    if sys.argv[1] == "--train":
        source_rank.join_vllm = join_by_gloo  # type: ignore[attr-defined]
        train(*sys.argv[2:])
        return
    native_nccl.WITHOUT_GPU = True
    from rlctl.cli.main import main as rlctl_main

    rlctl_main()


if __name__ == "__main__":
    main()
