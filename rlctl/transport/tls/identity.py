"""Identities in certificates: their form, the name of a server, and the services that an identity may call."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.rules.fields import SLOT

SCHEME = "rlctl://"
DOMAIN = "rlctl.internal"
"""Suffix of the DNS names of roles; ICANN reserves .internal for private use."""

DATA_PORT = "data port"
"""Name of a stage's data port, which is no gRPC service."""

GATEWAY = "gateway"
"""Name of a gateway's HTTP interface."""

_FLEET = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Role(enum.StrEnum):
    """The role of a process in a fleet."""

    COORDINATOR = "coordinator"
    STAGE = "stage"
    WORKER = "worker"
    GATEWAY = "gateway"
    TRAINER = "trainer"
    CLIENT = "client"


@dataclass(frozen=True)
class Identity:
    """The subject of a certificate, written as a URI: ``rlctl://FLEET/coordinator``, ``rlctl://FLEET/stage/SLOT``.

    Attributes:
        fleet: DNS label that all certificates of a fleet share.
        role: role of the process.
        name: slot of a stage or worker, name of a gateway, trainer or client; "" for the coordinator.
    """

    fleet: str
    role: Role
    name: str = ""

    def __str__(self) -> str:
        return f"{SCHEME}{self.fleet}/{self.path}"

    @property
    def path(self) -> str:
        """Return the part after the fleet, "stage/actor-0"."""
        return f"{self.role}/{self.name}" if self.name else str(self.role)

    @property
    def server_name(self) -> str:
        """Return the DNS name in a certificate of this identity."""
        return server_name(self.fleet, self.role)

    @classmethod
    def of(cls, uri: str) -> Identity:
        """Parse a URI. Raises TLS_INVALID."""
        fleet, _, path = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME):
            raise Reason.TLS_INVALID.error(f"{uri!r} does not begin with {SCHEME}", field="identity")
        return cls.parse(fleet, path)

    @classmethod
    def parse(cls, fleet: str, path: str) -> Identity:
        """Return the identity of a path, "stage/actor-0", in a fleet. Raises TLS_INVALID."""
        role, slash, name = path.partition("/")
        if not _FLEET.fullmatch(fleet):
            raise Reason.TLS_INVALID.error(f"fleet {fleet!r} is no DNS label in lower case", field="fleet")
        if role not in list(Role):
            raise Reason.TLS_INVALID.error(f"{role!r} is not one of {', '.join(Role)}", field="identity")
        if (role == Role.COORDINATOR and slash) or (role != Role.COORDINATOR and not SLOT.fullmatch(name)):
            form = role if role == Role.COORDINATOR else f"{role}/NAME"
            raise Reason.TLS_INVALID.error(f"{path!r} is not of the form {form}", field="identity")
        return cls(fleet, Role(role), name)


def server_name(fleet: str, role: Role) -> str:
    """Return the DNS name that a caller requires in the certificate of a server of this role.

    Hosts of stages change with every placement; roles do not. Nomad and Consul name their servers alike.
    """
    return f"{role}.{fleet}.{DOMAIN}"


def only_identity(uris: Iterable[str]) -> Identity | None:
    """Return the identity among the URIs of a certificate; None unless exactly one URI is an identity."""
    identities = [uri for uri in uris if uri.startswith(SCHEME)]
    try:
        return Identity.of(identities[0]) if len(identities) == 1 else None
    except RlctlError:
        return None


_USERS = frozenset({Role.COORDINATOR, Role.GATEWAY, Role.TRAINER, Role.CLIENT})
"""A coordinator embedded in a trainer uses its own fleet."""

_CALLERS = {
    "rlctl.v1.CoordinatorService": _USERS,
    "rlctl.v1.StageService": frozenset({Role.COORDINATOR}),
    "rlctl.v1.WorkerService": frozenset({Role.STAGE}),
    "rlctl.v1.RolloutService": _USERS,
    "rlctl.v1.TrainerService": frozenset({Role.TRAINER, Role.COORDINATOR}),
    DATA_PORT: _USERS,
    GATEWAY: _USERS,
}
"""Service → roles that may call the service. Health and reflection are open to every identity of the fleet."""

_OF_STAGES = {
    "/rlctl.v1.CoordinatorService/RegisterStage": frozenset({Role.STAGE}),
    "/rlctl.v1.CoordinatorService/DeregisterStage": _USERS | {Role.STAGE},
}
"""Methods of the coordinator that stages call."""


def refusal(server: Identity, caller: Identity | None, service: str, method: str = "") -> RlctlError | None:
    """Return the refusal of a caller's call to a method of a service at a server, or None."""
    if caller is None:
        why = "the caller has no certificate with an identity (one URI rlctl://FLEET/ROLE)"
    elif caller.fleet != server.fleet:
        why = f"{caller} is of another fleet than {server}"
    elif caller.role not in _roles(service, method):
        why = f"{caller} may not call {method or service}{f' of {service}' if method else ''}"
    elif caller.role is Role.STAGE and server.role is Role.WORKER and caller.name != server.name:
        why = f"{caller} is not the stage of {server}"
    else:
        return None
    return Reason.PEER_NOT_ALLOWED.error(why)


def _roles(service: str, method: str) -> frozenset[Role]:
    return _OF_STAGES.get(f"/{service}/{method}") or _CALLERS.get(service, frozenset(Role))
