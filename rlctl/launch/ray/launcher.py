"""The Ray launcher: every server of an engine in an actor, on the nodes that its placement group holds.

rlctl decides what becomes of an engine, not Ray: actors are not restarted (a new process is a new incarnation, which is
healed before it serves), and nothing is detached: what the driver started ends with the driver.
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
from rlctl.launch.local.child_processes import STOP_S
from rlctl.launch.local.log_files import last_line, last_lines, log_end
from rlctl.transport.auth import token_variables
from rlctl.transport.tls.authority import Authority, certificate_variables
from rlctl.v1.common_pb2 import ErrorDetail

# Read by Ray when it is imported. It prints what it notices to the driver's standard output, which is the user's; what
# concerns an engine is told by its failure.
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
from rlctl.launch.ray.given_placement_group import GivenGroup
from rlctl.launch.ray.placement_groups import Placement, Places

CONNECT_S = 5.0
KILLED_S = 2.0
LOOK_S = 0.05
CALLS = 8
"""Of an actor at once: two that wait, and what it is told meanwhile."""
LOST = -1
"""The return code of a process whose end nobody saw."""


class RayProcess:
    """One server on the cluster, as :class:`rlctl.launch.interface.launcher.Launched` has it.

    Asking how it is takes it a step on: from waiting for room to the actor, from there to what the actor says.
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
        """Its process id on its node; 0 until it has announced itself."""
        return int(self.facts.get("pid", 0))

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs; LOST when nobody saw it."""
        self._look(0)
        return self._returncode

    @property
    def serves(self) -> bool:
        """Whether it has announced itself."""
        self._look(0)
        return bool(self.facts)

    def announced(self, timeout_s: float) -> dict[str, str]:
        """Wait for the facts. Raises ENGINE_FAILED, DEADLINE_EXCEEDED, PLACE_UNAVAILABLE."""
        deadline = time.monotonic() + timeout_s
        while not self.serves:
            if self._returncode is not None:
                raise self.failure()
            if (left := deadline - time.monotonic()) <= 0:
                raise Reason.DEADLINE_EXCEEDED.error(f"{self.name} did not come up in {timeout_s:g} s; see {self.log}")
            self._look(min(left, LOOK_S))
        return self.facts

    def said(self) -> str:
        """The last line that it has logged; "" when it is on another machine."""
        return last_line(self.log, self._log_from)

    def log_lines(self) -> list[str]:
        """The last lines that it has logged; [] when they are on another machine."""
        return last_lines(self.log, self._log_from)

    def failure(self) -> RlctlError:
        """Why it ended."""
        return self._error or Reason.ENGINE_FAILED.error(f"{self.name} has not ended")

    def terminate(self) -> None:
        """Ask it to end."""
        if self._actor is None:
            self._over(0, Reason.ENGINE_FAILED.error(f"{self.name} was ended before there was room for it"))
        else:
            self._actor.terminate.remote()

    def kill(self) -> None:
        """End it at once."""
        if self._actor is None:
            self.terminate()
        else:
            self._actor.kill.remote()

    def wait(self, timeout_s: float = STOP_S) -> bool:
        """Wait until it has ended, killing it when that takes longer; returns whether that was needed."""
        self._look(timeout_s)
        if self._returncode is not None:
            return False
        self.kill()
        self._look(KILLED_S)
        if self._returncode is None:  # the actor does not answer; its child ends with it
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
                self.facts = ray.get(self._announced)
            if self._ended in done or ray.wait([self._ended], timeout=0)[0]:
                code, detail = ray.get(self._ended)
                self._over(code, self._where(from_detail(ErrorDetail.FromString(detail))))
        except RlctlError as error:
            self._over(LOST, error)
        except ray.exceptions.RayError as error:
            self._over(LOST, self._lost(error))

    def _start(self) -> bool:
        """Start the actor when there is room; returns whether there is."""
        if not self._places.stands(self._placement):
            return False
        server, placement = self._server, self._placement
        part = placement.at(server.rank)
        self._node = self._places.address(placement.nodes[part])
        takes = placement.takes
        self._actor = (
            ray.remote(ServerActor)
            .options(
                num_cpus=takes.get("CPU", 0),
                num_gpus=takes.get("GPU", 0),
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
            ray.kill(self._actor)  # it has nothing left to hold; one that does not answer takes its child along
        self._places.leave(self._placement)

    def _where(self, error: RlctlError) -> RlctlError:
        return error.reason.error(error.message, field=error.field, next_step=f"See {self.log} on {self._node}.")

    def _lost(self, error: ray.exceptions.RayError) -> RlctlError:
        """What Ray says of an actor that is gone, in a line."""
        if "placement group was removed" in str(error):
            return self._where(
                Reason.PLACE_UNAVAILABLE.error(
                    f"{self.name} was ended with its placement group on {self._node}: whoever made that has removed it",
                    field="fleet.ray.placement_group",
                )
            )
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "node has died" in line), lines[-1] if lines else type(error).__name__)
        return self._where(Reason.ENGINE_FAILED.error(f"{self.name} was lost with its actor on {self._node}: {said}"))


class RayLauncher:
    """Servers on the nodes of a Ray cluster that runs already; this machine is one of its nodes."""

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
        module: str = "rlctl",
        authority: Authority | None = None,
    ) -> None:
        """Connect. ``directory``: of the logs, on every node. ``listen``: where the coordinator listens.

        ``per_node``: ranks of an engine that go on one node. ``group``: name or id of a placement group to put the
        engines into, "": they get groups of their own; ``bundles``: those of it that may be used, in the order of the
        plan's places, all if none; ``share``: how much of its bundle a rank takes.
        ``authority``: of the certificates, in a directory that all nodes share.

        ``address``: of the cluster; "": RAY_ADDRESS, or the one that runs here. Raises UNREACHABLE: there is none;
        FIELD_INVALID: its nodes cannot reach the coordinator.
        """
        self._directory = directory
        self._interface = interface
        self._environment = token_variables(token)
        self._authority = authority
        self._flags = ("--insecure",) if insecure else ()
        self._module = module
        _connect(address or os.environ.get("RAY_ADDRESS", ""))
        _refuse_out_of_reach(listen)
        self._places = GivenGroup(per_node, group, bundles, share) if group else Places(per_node)

    def launch(self, spec: EngineSpec, rank: int, coordinator: str, followers: Sequence[str] = ()) -> RayProcess:
        """Start the server of a rank as soon as there is room for its engine."""
        cores = max(spec.cpus, 1)
        environment = {"OMP_NUM_THREADS": str(cores), **spec.environment, **self._environment}
        environment |= certificate_variables(self._authority, spec.identity(rank))
        log = self._directory / f"{spec.process(rank)}.log"
        server = Server(
            spec, rank, coordinator, tuple(followers), self._flags, environment, self._interface, log, self._module
        )
        return RayProcess(server, self._places)

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        """Hold a placement group for each placeholder, or see that everything fits into the one that is given.

        Raises PLACE_UNAVAILABLE, FIELD_INVALID.
        """
        self._places.make_room(engines, places)

    def close(self) -> None:
        """Leave the cluster; what is held there is given back."""
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
        said = str(error).strip().splitlines()
        raise Reason.UNREACHABLE.error(
            f"no Ray cluster at {address or 'this machine'}: {said[0] if said else type(error).__name__}",
            field="fleet.ray.address",
            next_step=step,
        ) from None


def _refuse_out_of_reach(listen: str) -> None:
    """Raise FIELD_INVALID where the nodes of the cluster could not reach a coordinator."""
    host = listen.rpartition(":")[0].strip("[]")
    nodes = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
    elsewhere = [address for address in nodes if not ipaddress.ip_address(address).is_loopback]
    local = listen.startswith("unix:") or host == "localhost" or host.startswith("127.") or host == "::1"
    if host in ("", "0.0.0.0", "::") or (local and elsewhere):
        ray.shutdown()
        raise Reason.FIELD_INVALID.error(
            f"the nodes of the cluster ({', '.join(sorted(nodes))}) cannot reach a coordinator at {listen}",
            field="fleet.listen",
            next_step="--listen, or fleet.listen, with an address of this node that the others reach.",
        )


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, in Python and below."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
