"""The actor that runs one server of an engine, as a child process, on a node of a Ray cluster.

The server is a separate process. The actor can kill the server in any state, and still reports exit status and last log
line. torch finds the environment for the import. Ray's threads and copy of gRPC cannot interfere. The child's standard
input is a pipe of the actor, so the child ends with the actor in any case.
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
    """A server to start.

    Attributes:
        spec: the engine.
        rank: rank of the engine.
        coordinator: address of the coordinator.
        followers: addresses of the other ranks, for rank 0.
        flags: arguments of every server.
        environment: environment variables, including the engine's.
        interface: interface or network to bind to; "": the node's address in Ray.
        log: path of the log on the node.
        gpus: further GPUs beside the actor's GPU, held by other bundles.
    """

    spec: EngineSpec
    rank: int
    coordinator: str
    followers: tuple[str, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    interface: str
    log: Path
    gpus: tuple[str, ...] = ()


class BundleActor:
    """Holds the bundle of a rank without a process: a server engine's process is in its first rank's bundle."""

    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs of the bundle, in the node's numbering."""
        return _own_gpus()


class ServerActor:
    """Runs one server. The methods run concurrently, in a thread each."""

    def __init__(self, server: Server) -> None:
        private_files.make_directory(server.log.parent)
        name = server.spec.process(server.rank)
        arguments = [*rank_arguments(self._here(server), server.rank, server.coordinator, server.followers),
                     *server.flags]  # fmt: skip
        gpu_environment = {"CUDA_VISIBLE_DEVICES": ",".join((*_own_gpus(), *server.gpus))} if server.gpus else {}
        self._process = Process(name, arguments, server.log, {**server.environment, **gpu_environment})

    @staticmethod
    def _here(server: Server) -> EngineSpec:
        """Return the spec on this node: the address, and the GPUs in the actor's numbering from 0."""
        spec = server.spec
        bind = address_on(server.interface) if server.interface else str(ray.util.get_node_ip_address())
        # A process sees only the GPUs of its ranks.
        gpus = tuple(rank % spec.ranks_each for rank in range(spec.ranks))
        return replace(spec, bind=bind, gpus=gpus)

    def announced(self) -> dict[str, str]:
        """Wait for the announcement and return the facts; {} if the process ended before."""
        return self._process.until_announced()

    def ended(self) -> tuple[int, bytes]:
        """Wait for the end and return the exit status and the reason (an ErrorDetail)."""
        code = self._process.until_ended()
        return code, self._process.failure().detail().SerializeToString()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _own_gpus() -> tuple[str, ...]:
    return tuple(map(str, ray.get_gpu_ids()))
