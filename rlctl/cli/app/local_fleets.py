"""Choice of a command's fleet among several fleets of this machine.

An explicit endpoint or name comes first: option, environment, context. Without one, a command uses the only fleet of
this machine that is up, under any name. A fleet is up while the supervisor lives; state files of dead supervisors do
not count.
"""

from __future__ import annotations

from rlctl.contract.errors import Reason
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.fleet_state import FleetState

DEFAULT_NAME = "default"
DEFAULT_ENDPOINT = "127.0.0.1:5080"

_LOCAL_HOSTS = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class FleetChoice:
    """The choice of a command, kept for the whole command.

    Attributes:
        fleet: the chosen fleet, the only fleet that is up; None for an explicit endpoint or name.
    """

    def __init__(self) -> None:
        self.fleet: FleetState | None = None

    def endpoint(self, explicit: str | None) -> str:
        """Return the address of the coordinator.

        The default address, where `rlctl coordinator` listens, applies if no fleet is up. Raises FIELD_REQUIRED if
        several fleets are up, UNREACHABLE while the coordinator of the only fleet does not listen yet.
        """
        if explicit is not None:
            return explicit
        fleet = self._only("Name its coordinator with --endpoint or RLCTL_ENDPOINT.", "--endpoint")
        if fleet is None:
            return DEFAULT_ENDPOINT
        if not fleet.endpoint:
            raise Reason.UNREACHABLE.error(
                f"fleet {fleet.name!r} is still starting: its coordinator does not listen yet",
                next_step="Try again in a moment.",
            )
        self.fleet = fleet
        return fleet.endpoint

    def name(self, explicit: str | None, endpoint: str | None) -> str:
        """Return the name of a fleet that `rlctl up` started on this machine.

        ``explicit``: the name on the command line, if any; ``endpoint``: the explicit endpoint, if any. The default
        name applies if no fleet is up: a fleet that is down has logs. Raises FIELD_REQUIRED if several fleets are up,
        FIELD_INVALID if no fleet of this machine is at ``endpoint``.
        """
        if explicit is not None:
            return explicit
        if endpoint is not None:
            return _name_at(endpoint)
        self.fleet = self._only("Name it with --name.", "--name")
        return self.fleet.name if self.fleet is not None else DEFAULT_NAME

    def certificates(self, endpoint: str) -> str:
        """Return the certificate directory of this machine's fleet at an endpoint; "" for any other endpoint."""
        matches = (fleet for fleet in fleet_state.up() if _comparable(fleet.endpoint) == _comparable(endpoint))
        return next((str((fleet.deployment or {}).get("tls", "")) for fleet in matches), "")

    def _only(self, next_step: str, field: str) -> FleetState | None:
        if self.fleet is not None:
            return self.fleet
        fleets = fleet_state.up()
        if len(fleets) > 1:
            raise Reason.FIELD_REQUIRED.error(
                f"{len(fleets)} fleets are up on this machine: {listed(fleets)}", field=field, next_step=next_step
            )
        return fleets[0] if fleets else None


def listed(fleets: list[FleetState]) -> str:
    return ", ".join(f"{fleet.name!r} at {fleet.endpoint or 'no endpoint yet'}" for fleet in fleets) or "none"


def _name_at(endpoint: str) -> str:
    fleets = fleet_state.up()
    for fleet in fleets:
        if _comparable(fleet.endpoint) == _comparable(endpoint):
            return fleet.name
    raise Reason.FIELD_INVALID.error(
        f"no fleet of this machine is up at {endpoint}; fleets that are up: {listed(fleets)}",
        field="--endpoint",
        next_step="Name the fleet with --name; --endpoint, RLCTL_ENDPOINT or the context has set the endpoint.",
    )


def _comparable(endpoint: str) -> str:
    """Return the endpoint with a single spelling for this host."""
    host, colon, port = endpoint.rpartition(":")
    return f"{_LOCAL_HOSTS.get(host, host)}{colon}{port}"
