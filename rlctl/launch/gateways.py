"""The HTTP gateways of a fleet: one process per model with a gateway, kept as the deployment describes.

Gateways keep no state, so no drain is needed: an ending gateway completes open requests. A gateway that ends by itself
is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.engine_lifecycle import REMIND_S, START_S, backoff_of
from rlctl.launch.interface.launcher import Launched
from rlctl.launch.interface.spec import GatewaySpec
from rlctl.launch.local.child_processes import stop_all, unended
from rlctl.launch.local.launcher import LocalLauncher
from rlctl.runtime.addresses import split
from rlctl.runtime.kills import KILLED_S

LEAVE_S = 60.0
"""Seconds for the requests of a removed gateway."""


@dataclass
class _Gateway:
    spec: GatewaySpec
    process: Launched
    at: GatewaySpec
    since: float
    remind_s: float = REMIND_S
    ready: bool = False
    failures: int = 0
    again_at: float = 0.0


class Gateways:
    """The gateways of a fleet. Gateways run beside the coordinator, with any launcher.

    Attributes:
        wanted: gateways to run.
        errors: last failure by model; a gateway that answers has no entry.
        unended: error that names removed gateways that no kill ends, or None.
        backoff_s: seconds before the first retry after a failure; doubles.
    """

    def __init__(
        self, specs: Sequence[GatewaySpec], launcher: LocalLauncher, backoff_s: float, say: Callable[[str], None]
    ) -> None:
        self.specs = tuple(specs)
        self.errors: dict[str, RlctlError] = {}
        self.unended: RlctlError | None = None
        self._launcher = launcher
        self.backoff_s = backoff_s
        self._say = say
        self._running: dict[str, _Gateway] = {}
        self._leaving: list[tuple[Launched, float]] = []

    @property
    def processes(self) -> list[Launched]:
        return [*(gateway.process for gateway in self._running.values()), *(process for process, _ in self._leaving)]

    @property
    def addresses(self) -> dict[str, str]:
        """URL of the gateway by model, http://HOST:PORT."""
        return {model: gateway.process.facts["address"] for model, gateway in self._running.items() if gateway.ready}

    @property
    def routers(self) -> dict[str, str]:
        """URL of the router in front of the gateway, for models with a router."""
        ready = {model: gateway.process.facts for model, gateway in self._running.items() if gateway.ready}
        return {model: facts["router"] for model, facts in ready.items() if "router" in facts}

    @property
    def settled(self) -> bool:
        """Whether all wanted gateways answer, and no other gateway runs."""
        return {gateway.spec for gateway in self._running.values() if gateway.ready} == set(self.specs) and not (
            self.errors or self._leaving
        )

    def look(self, coordinator: str, *, restart: bool) -> None:
        """Take one step per gateway. ``restart``: ended gateways start again at the same address."""
        self._reap()
        specs = {spec.model: spec for spec in self.specs}
        for model, gateway in list(self._running.items()):
            if specs.get(model) != gateway.spec:
                gateway.process.terminate()
                self._leaving.append((gateway.process, time.monotonic() + LEAVE_S))
                del self._running[model]
                self.errors.pop(model, None)
            else:
                self._advance(gateway, coordinator, restart=restart)
        for model, spec in specs.items():
            if model not in self._running and not self._port_held(spec):
                try:
                    self._running[model] = _Gateway(spec, self._start(spec, coordinator), spec, time.monotonic())
                except RlctlError as error:
                    self.errors.setdefault(model, error)  # retried at the next step
                else:
                    self.errors.pop(model, None)
        for model in self.errors.keys() - specs.keys():
            del self.errors[model]

    def stop(self) -> list[Launched]:
        """End all gateways; returns the processes that had to be killed."""
        late = stop_all(self.processes)
        self._running.clear()
        self._leaving.clear()
        return late

    def _port_held(self, spec: GatewaySpec) -> bool:
        """Whether a removed gateway, which may have requests to end, still listens at this address."""
        addresses = {
            _bound(process.facts.get(kind, "")) for process, _ in self._leaving for kind in ("address", "router")
        }
        return not addresses.isdisjoint({spec.listen, spec.router_listen} - {""})

    def _advance(self, gateway: _Gateway, coordinator: str, *, restart: bool) -> None:
        model = gateway.spec.model
        if model in self.errors:
            if restart and time.monotonic() >= gateway.again_at and gateway.process.returncode is not None:
                gateway.process.wait()
                try:
                    gateway.process = self._start(gateway.at, coordinator)
                except RlctlError as error:
                    self._failed(gateway, error)
                else:
                    gateway.since, gateway.remind_s = time.monotonic(), REMIND_S
                    del self.errors[model]
        elif gateway.process.returncode is not None:
            gateway.process.wait()
            gateway.ready = False
            self._failed(gateway, gateway.process.failure())
        elif gateway.process.serves and not gateway.ready:
            address = gateway.process.facts["address"]
            gateway.ready = True
            gateway.failures = 0
            router = gateway.process.facts.get("router", "")
            # Clients that know the addresses reach them again.
            gateway.at = replace(gateway.spec, listen=_bound(address), router_listen=_bound(router))
            behind = f", {gateway.spec.router} at {router}" if router else ""
            self._say(f"{gateway.spec.process}: ready at {address}{behind}")
        elif not gateway.ready:
            self._wait_for(gateway)

    def _wait_for(self, gateway: _Gateway) -> None:
        """Report that a start continues; end a gateway that takes too long."""
        process, since_s = gateway.process, time.monotonic() - gateway.since
        if since_s > START_S:
            process.kill()
            why = f"{process.name} did not come up in {START_S:g} s"
            self._failed(gateway, Reason.DEADLINE_EXCEEDED.error(why, next_step=f"See {process.log}."))
        elif since_s >= gateway.remind_s:
            gateway.remind_s *= 2
            log_line = process.last_log_line()
            self._say(
                f"{process.name}: still starting after {since_s:.0f} s"
                + (f"; its log says: {log_line}" if log_line else "")
            )

    def _failed(self, gateway: _Gateway, error: RlctlError) -> None:
        self.errors[gateway.spec.model] = error
        gateway.again_at = time.monotonic() + backoff_of(self.backoff_s, gateway.failures)
        gateway.failures += 1

    def _reap(self) -> None:
        for process, deadline in list(self._leaving):
            if process.returncode is None and time.monotonic() > deadline:
                process.kill()
            if process.returncode is not None:
                process.wait()
                self._leaving.remove((process, deadline))
                self._say(f"{process.name}: stopped")
        overdue = [process for process, deadline in self._leaving if time.monotonic() > deadline + KILLED_S]
        error = unended(overdue)
        if error is None or self.unended is None or error.message != self.unended.message:
            self.unended = error

    def _start(self, spec: GatewaySpec, coordinator: str) -> Launched:
        return self._launcher.start(
            spec.process, spec.arguments(coordinator), identity=spec.identity, hosts=[split(spec.listen, "listen")[0]]
        )


def _bound(url: str) -> str:
    return url.partition("://")[2]
