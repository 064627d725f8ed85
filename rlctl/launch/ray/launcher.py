"""The Ray launcher: every server of an engine in an actor, on the nodes of the engine's placement group.

rlctl restarts engines, and Ray does not restart actors: a new process is a new incarnation, to be healed before it
serves. No actor is detached: started processes end with the driver.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.local.log_files import last_line, last_lines, log_end
from rlctl.runtime.server_process import STOP_S
from rlctl.transport.auth import token_variables
from rlctl.transport.tls.authority import Authority, certificate_variables
from rlctl.v1.common_pb2 import ErrorDetail

# Read at Ray's import. Ray prints messages to the driver's standard output, which belongs to the user. Failures of
# engines are reported by rlctl.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise Reason.UNSUPPORTED.error(
        "the Ray launcher needs Ray, which is not installed here", next_step="pip install 'rlctl[ray]'"
    ) from None

from rlctl.launch.ray.actor import Server, ServerActor
from rlctl.launch.ray.bounded_calls import CALL_S
from rlctl.launch.ray.given_placement_group import GivenGroup
from rlctl.launch.ray.placement_groups import Placement, Places, nodes

CONNECT_S = 5.0
KILLED_S = 2.0
LOOK_S = 0.05
CALLS = 8
"""Concurrent calls of an actor: two that wait, and further commands."""
LOST = -1
"""Return code of a process whose end was not observed."""


class RayProcess:
    """A server on the cluster, as a :class:`rlctl.launch.interface.launcher.Launched`.

    Each query takes a step: from the wait for room to the actor, then to the actor's answer.
    """

    def __init__(self, server: Server, places: Places) -> None:
        self.name = server.spec.process(server.rank)
        self.log = server.log
        self._log_from = log_end(server.log)
        self.facts: dict[str, str] = {}
        self._server = server
        self._places = places
        self._placement: Placement = places.use(server.spec)
        self._actor: Any = None
        self._announced: Any = None
        self._ended: Any = None
        self._node = ""
        self._returncode: int | None = None
        self._error: RlctlError | None = None

    @property
    def pid(self) -> int:
        """Process id on the server's node; 0 before the announcement."""
        return int(self.facts.get("pid", 0))

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the server runs; LOST if the end was not observed."""
        self._look(0)
        return self._returncode

    @property
    def serves(self) -> bool:
        """Whether the server has announced its address."""
        self._look(0)
        return bool(self.facts)

    def announced(self, timeout_s: float) -> dict[str, str]:
        """Wait for the facts. Raises ENGINE_FAILED, DEADLINE_EXCEEDED, PLACE_UNAVAILABLE."""
        deadline = time.monotonic() + timeout_s
        while not self.serves:
            if self._returncode is not None:
                raise self.failure()
            if (remaining_s := deadline - time.monotonic()) <= 0:
                raise Reason.DEADLINE_EXCEEDED.error(f"{self.name} did not come up in {timeout_s:g} s; see {self.log}")
            self._look(min(remaining_s, LOOK_S))
        return self.facts

    def last_log_line(self) -> str:
        """Return the last line of the log; "" for a log on a different machine."""
        return last_line(self.log, self._log_from)

    def log_lines(self) -> list[str]:
        """Return the last lines of the log; [] for a log on a different machine."""
        return last_lines(self.log, self._log_from)

    def failure(self) -> RlctlError:
        return self._error or Reason.ENGINE_FAILED.error(f"{self.name} has not ended")

    def terminate(self) -> None:
        if self._actor is None:
            self._over(0, Reason.ENGINE_FAILED.error(f"{self.name} was ended before there was room for it"))
        else:
            self._actor.terminate.remote()

    def kill(self) -> None:
        if self._actor is None:
            self.terminate()
        else:
            self._actor.kill.remote()

    def wait(self, timeout_s: float = STOP_S, killed_s: float = KILLED_S) -> bool:
        """Wait for the end, with a kill after the time; returns whether the kill was needed.

        A server without an answer ``killed_s`` after the kill is LOST.
        """
        self._look(timeout_s)
        if self._returncode is not None:
            return False
        self.kill()
        self._look(killed_s)
        if self._returncode is None:  # the actor does not answer, and the child ends with the actor
            self._over(LOST, Reason.ENGINE_FAILED.error(f"{self.name} did not answer and was killed"))
        return True

    def _look(self, timeout_s: float) -> None:
        if self._returncode is not None:
            return
        try:
            if self._actor is None and not self._start():
                time.sleep(min(timeout_s, LOOK_S))
                return
            waiting = [self._ended] if self.facts else [self._ended, self._announced]
            done, _ = ray.wait(waiting, timeout=timeout_s)
            if self._announced in done and not self.facts:
                self.facts = ray.get(self._announced, timeout=CALL_S)
            if self._ended in done or ray.wait([self._ended], timeout=0)[0]:
                code, detail = ray.get(self._ended, timeout=CALL_S)
                self._over(code, self._where(from_detail(ErrorDetail.FromString(detail))))
        except RlctlError as error:
            self._over(LOST, error)
        except ray.exceptions.RayError as error:
            self._over(LOST, self._lost(error))

    def _start(self) -> bool:
        """Start the actor if there is room; returns whether there is room."""
        if not self._places.stands(self._placement):
            return False
        server, placement = self._server, self._placement
        part = placement.at(server.rank)
        self._node = self._places.address(placement.nodes[part])
        resources = placement.takes
        self._actor = (
            ray.remote(ServerActor)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_concurrency=CALLS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, placement.bundles[part]),
            )
            .remote(replace(server, gpus=placement.further_gpus(server.rank)))
        )
        self._announced = self._actor.announced.remote()
        self._ended = self._actor.ended.remote()
        return True

    def _over(self, code: int, error: RlctlError) -> None:
        if self._returncode is not None:
            return
        self._returncode = code
        self._error = error
        if self._actor is not None:
            ray.kill(self._actor)  # no resource is left to hold; a stuck actor takes the child along
        self._places.leave(self._placement)

    def _where(self, error: RlctlError) -> RlctlError:
        return error.reason.error(error.message, field=error.field, next_step=f"See {self.log} on {self._node}.")

    def _lost(self, error: ray.exceptions.RayError) -> RlctlError:
        """Return an error with Ray's message about a lost actor, in one line."""
        if "placement group was removed" in str(error):
            return self._where(
                Reason.PLACE_UNAVAILABLE.error(
                    f"{self.name} was ended with its placement group on {self._node}, which its owner has removed",
                    field="fleet.ray.placement_group",
                )
            )
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = next(
            (line for line in lines if "node has died" in line), lines[-1] if lines else type(error).__name__
        )
        return self._where(
            Reason.ENGINE_FAILED.error(f"{self.name} was lost with its actor on {self._node}: {message}")
        )


class RayLauncher:
    """Starts servers on the nodes of a running Ray cluster. This machine must be a node of the cluster."""

    def __init__(
        self,
        directory: Path,
        *,
        listen: str,
        address: str = "",
        group: str = "",
        bundles: Sequence[int] = (),
        share: float = 1.0,
        per_node: int = 8,
        interface: str = "",
        token: str | None = None,
        insecure: bool = False,
        authority: Authority | None = None,
    ) -> None:
        """Connect to the cluster.

        Raises UNREACHABLE without a cluster, FIELD_INVALID if nodes cannot reach the coordinator.

        Args:
            directory: directory of the logs, on every node.
            listen: address of the coordinator.
            address: address of the cluster; "": RAY_ADDRESS, or the cluster of this machine.
            group: name or id of a placement group for the engines; "": the launcher makes groups.
            bundles: usable bundles of ``group``, in the order of the plan's places; empty: all.
            share: part of the bundle that a rank takes.
            per_node: ranks of an engine on one node.
            authority: issuer of the certificates, in a directory shared by all nodes.
        """
        self._directory = directory
        self._interface = interface
        self._environment = token_variables(token)
        self._authority = authority
        self._flags = ("--insecure",) if insecure else ()
        _connect(address or os.environ.get("RAY_ADDRESS", ""))
        _refuse_out_of_reach(listen)
        self._places = GivenGroup(per_node, group, bundles, share) if group else Places(per_node)

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> RayProcess:
        """Start the server of a rank as soon as the cluster has room for the engine."""
        cores = max(spec.cpus, 1)
        environment = {"OMP_NUM_THREADS": str(cores), **spec.environment, **self._environment}
        environment |= certificate_variables(self._authority, spec.identity(rank))
        log = self._directory / f"{spec.process(rank)}.log"
        server = Server(spec, rank, coordinator, tuple(followers), self._flags, environment, self._interface, log)
        return RayProcess(server, self._places)

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Make a placement group for each placeholder, or check that all fits into the given group.

        Raises PLACE_UNAVAILABLE, FIELD_INVALID.
        """
        self._places.make_room(engines, places)

    def close(self) -> None:
        """Give all groups back and leave the cluster."""
        self._places.close()
        ray.shutdown()


def _connect(address: str) -> None:
    """Join the cluster as a driver. Raises FIELD_INVALID, UNREACHABLE."""
    if address.startswith("ray://"):
        raise Reason.FIELD_INVALID.error(
            "Ray Client (ray://) cannot be used: its placement groups end with the connection",
            field="fleet.ray.address",
            next_step="Run `rlctl up` on a node of the cluster.",
        )  # fmt: skip
    step = "`ray start --head` starts a cluster; --address, fleet.ray.address or RAY_ADDRESS names one."
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        # Ray itself would try for two minutes.
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise Reason.UNREACHABLE.error(
                f"no Ray cluster answers at {address}: {error}", field="fleet.ray.address", next_step=step
            ) from None
    try:
        with _signals_kept():
            ray.init(
                address=address or "auto", namespace="rlctl", log_to_driver=False, configure_logging=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
    except (ConnectionError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise Reason.UNREACHABLE.error(
            f"no Ray cluster at {address or 'this machine'}: {lines[0] if lines else type(error).__name__}",
            field="fleet.ray.address",
            next_step=step,
        ) from None


def _refuse_out_of_reach(listen: str) -> None:
    """Raise FIELD_INVALID if nodes of the cluster cannot reach a coordinator at ``listen``."""
    host = listen.rpartition(":")[0].strip("[]")
    addresses = [str(node["NodeManagerAddress"]) for node in nodes() if node["Alive"]]
    remote_nodes = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    local = listen.startswith("unix:") or host == "localhost" or host.startswith("127.") or host == "::1"
    if host in ("", "0.0.0.0", "::") or (local and remote_nodes):
        ray.shutdown()
        raise Reason.FIELD_INVALID.error(
            f"the nodes of the cluster ({', '.join(sorted(addresses))}) cannot reach a coordinator at {listen}",
            field="fleet.listen",
            next_step="Set --listen or fleet.listen to an address of this node that the other nodes reach.",
        )


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers: Ray takes SIGTERM, in Python and in native code."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
