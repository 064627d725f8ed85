"""The actor that runs one server of an engine, as its child process, on a node of a Ray cluster.

The server is a process of its own and not the actor: it can be killed whatever state it is in, how it ended and the
last line of its log are still told, torch finds the environment that it is to load in, and Ray's threads and its copy
of gRPC are not in the way. The child's standard input is a pipe of the actor's, so it ends when the actor does, however
that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

from rlctl.launch.interface.spec import EngineSpec, rank_arguments
from rlctl.launch.local.child_processes import Process
from rlctl.runtime import private_files
from rlctl.weights.group.network_interfaces import address_on


@dataclass(frozen=True)
class Server:
    """One server to start.

    Attributes:
        spec: the engine.
        rank: which of its ranks.
        coordinator: its address.
        followers: addresses of the others, for rank 0.
        flags: what every server gets.
        environment: variables, the engine's included.
        interface: interface or network to bind to; "": the address under which Ray knows the node.
        log: its log, on the node.
        module: what is run in place of ``rlctl``.
        gpus: that it has beside those of its actor, which other bundles hold for it.
    """

    spec: EngineSpec
    rank: int
    coordinator: str
    followers: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    interface: str
    log: Path
    module: str = "rlctl"
    gpus: tuple[str, ...] = ()


class BundleActor:
    """Holds a bundle for a rank that has no process of its own: a server with ranks of its own is in their first."""

    def gpus(self) -> tuple[str, ...]:
        """GPUs of the bundle, as its node numbers them."""
        return _own_gpus()


class ServerActor:
    """Holds one server. Its methods run side by side, a thread each."""

    def __init__(self, server: Server) -> None:
        """Start it."""
        private_files.make_directory(server.log.parent)
        name = server.spec.process(server.rank)
        arguments = [*rank_arguments(self._here(server), server.rank, server.coordinator, server.followers),
                     *server.flags]  # fmt: skip
        seen = {"CUDA_VISIBLE_DEVICES": ",".join((*_own_gpus(), *server.gpus))} if server.gpus else {}
        self._process = Process(name, arguments, server.log, {**server.environment, **seen}, server.module)

    @staticmethod
    def _here(server: Server) -> EngineSpec:
        """The spec on this node: its address, and its GPUs by the numbers that Ray lets them be seen under, 0 first."""
        spec = server.spec
        bind = address_on(server.interface) if server.interface else str(ray.util.get_node_ip_address())
        # A process sees the GPUs of its own ranks only.
        gpus = tuple(rank % spec.ranks_each for rank in range(spec.ranks))
        return replace(spec, bind=bind, gpus=gpus)

    def announced(self) -> dict[str, str]:
        """Wait for what it announces; {} when it ended before."""
        return self._process.until_announced()

    def ended(self) -> tuple[int, bytes]:
        """Wait until it has ended: with what, and why (an ErrorDetail)."""
        code = self._process.until_ended()
        return code, self._process.failure().detail().SerializeToString()

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


def _own_gpus() -> tuple[str, ...]:
    """GPUs that Ray has given this actor."""
    return tuple(map(str, ray.get_gpu_ids()))
