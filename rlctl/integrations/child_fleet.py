"""A fleet of a trainer's own process: ``rlctl up`` as a child process, on the trainer's Ray cluster."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.launch.supervisor import fleet_state as state
from rlctl.runtime.kills import kill
from rlctl.v1.common_pb2 import ErrorDetail

LOOK_S = 0.1
STOP_S = 90.0
READ_S = 1.0
"""Seconds to read the last output of an ended `rlctl up`."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """Bundles of a placement group made by the trainer.

    Attributes:
        id: of the group, in hexadecimal.
        bundles: bundles for the engines, in the order of their ranks.
        share: a rank's share of its bundle.
    """

    id: str
    bundles: tuple[int, ...]
    share: float

    @property
    def flags(self) -> list[str]:
        """Return the flags for ``rlctl up``."""
        bundles = ",".join(map(str, self.bundles))
        return ["--placement-group", self.id, "--bundles", bundles, "--bundle-share", f"{self.share:g}"]


class Up:
    """A fleet of a child process. It ends with :meth:`stop`, with the block, and with any end of this process."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        """Start the fleet on this process's Ray cluster, and return when every engine serves.

        ``name``: of the fleet on this machine; ``arguments``: of ``rlctl up``. Raises the error of ``rlctl up``.
        """
        self._name = name
        command = [sys.executable, "-m", "rlctl", "-o", "json", "up", "--name", name, *arguments, "--end-with-parent"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            process_group=0,
        )  # fmt: skip
        self._last = ""
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True)
        self._reader.start()
        steps = state.Steps(name, self._process.pid)
        try:
            while not self._ready():
                if self._process.poll() is not None:
                    self._reader.join(READ_S)
                    raise self._failure()
                steps.refuse_stuck()
                time.sleep(LOOK_S)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def state(self) -> state.FleetState:
        """Return the present state of the fleet. Raises UNREACHABLE if the fleet has ended."""
        fleet_state = state.read(self._name)
        if fleet_state is None or fleet_state.pid != self._process.pid or not fleet_state.alive:
            raise Reason.UNREACHABLE.error(f"fleet {self._name!r} has ended: {self._last}", field="name")
        return fleet_state

    @property
    def endpoint(self) -> str:
        """Return the coordinator's address, for :func:`rlctl.connect`."""
        return self.state.endpoint

    def stop(self) -> None:
        """End all processes of the fleet; a placement group of the trainer stays.

        A process that no kill ends is reported in the log.
        """
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                # The end of the supervisor ends the fleet's processes too.
                if error := kill(self._process, f"`rlctl up` of fleet {self._name!r}"):
                    _log.warning("%s", error)
        self._reader.join(READ_S)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _ready(self) -> bool:
        fleet_state = state.read(self._name)
        return fleet_state is not None and fleet_state.pid == self._process.pid and fleet_state.phase == state.READY

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last = line.rstrip("\n") or self._last
                _log.info("%s: %s", self._name, self._last)

    def _failure(self) -> RlctlError:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            error = json.loads(self._last)["error"]
            fields = {name: error[name] for name in ("reason", "message", "field", "next_step")}
            return from_detail(ErrorDetail(**fields, metadata=error["metadata"]))
        return Reason.ENGINE_FAILED.error(f"`rlctl up` ended with {self._process.returncode}: {self._last}")


def cluster_flags() -> list[str]:
    """Return flags with this process's Ray cluster and node. Raises UNREACHABLE outside a cluster."""
    import ray

    if not ray.is_initialized():
        raise Reason.UNREACHABLE.error("this process has joined no Ray cluster", next_step="Call ray.init(...).")
    node = str(ray.util.get_node_ip_address())
    host = f"[{node}]" if ":" in node else node
    address = str(ray.get_runtime_context().gcs_address)
    return ["--launcher", "ray", "--address", address, "--listen", f"{host}:0", "--gateways", node]


def given(group: Any, bundles: Sequence[int], share: float) -> Given:
    """Return bundles of a Ray placement group."""
    return Given(group.id.hex(), tuple(map(int, bundles)), share)
