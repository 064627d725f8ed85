"""Scopes, principals and callers: the right to call a method, and the identity that a call is recorded under."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import Caller


class Scope(enum.Enum):
    """A right. Every scope includes VIEWER."""

    VIEWER = "viewer"
    """Read the fleet."""
    ROLLOUT = "rollout"
    """Generate and abort requests."""
    WEIGHTS = "weights"
    """Write the weights and adapters of models. Includes pause, continue and release of memory for the writes."""
    ADAPTERS = "adapters"
    """Load and unload adapters by name."""
    ADMIN = "admin"
    """Administer the fleet: all of the above, healing, slots, stages."""
    GATEWAY = "gateway"
    """Call in the name of another principal."""
    FLEET = "fleet"
    """Act as a process of the fleet itself: join the fleet, and command stages and workers. Includes all other scopes.
    """

    @property
    def named(self) -> bool:
        """Return True if the scope can be limited to names, for example ``weights:actor``."""
        return self in (Scope.WEIGHTS, Scope.ADAPTERS)


_INCLUDED = {
    Scope.ADMIN: frozenset({Scope.ROLLOUT, Scope.WEIGHTS, Scope.ADAPTERS}),
    Scope.FLEET: frozenset(Scope),
}

PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/-]{0,127}", re.ASCII)


@dataclass(frozen=True)
class Grant:
    """A scope, for all names or for a single name. ``name`` "": all."""

    scope: Scope
    name: str = ""

    @classmethod
    def parse(cls, text: str, field: str = "scope") -> Self:
        """Parse ``viewer``, ``weights`` or ``weights:actor``. Raises FIELD_INVALID."""
        word, colon, name = text.partition(":")
        try:
            scope = Scope(word)
        except ValueError:
            scopes = ", ".join(each.value for each in Scope)
            raise Reason.FIELD_INVALID.error(f"{word!r} is no scope; there are: {scopes}", field=field) from None
        if colon and not (scope.named and name):
            raise Reason.FIELD_INVALID.error(
                f"{text!r}: only weights and adapters can be limited to a name", field=field
            )
        return cls(scope, name)

    def __str__(self) -> str:
        return f"{self.scope.value}:{self.name}" if self.name else self.scope.value


@dataclass(frozen=True)
class Principal:
    """A caller that a server has authenticated, with its rights.

    Attributes:
        max_in_flight: quota: most requests in flight at one server; None: no quota.
    """

    name: str
    grants: frozenset[Grant]
    max_in_flight: int | None = None

    def has(self, scope: Scope) -> bool:
        """Return True if the principal has the scope, for at least one name."""
        if scope is Scope.VIEWER and self.grants:
            return True
        return any(grant.scope is scope or scope in _INCLUDED.get(grant.scope, ()) for grant in self.grants)

    def covers(self, scope: Scope, names: Collection[str]) -> bool:
        """Return True if the principal has the scope for each name. No names: for all names, including future names."""
        if not self.has(scope):
            return False
        own = {grant.name for grant in self.grants if grant.scope is scope}
        wider = any(scope in _INCLUDED.get(grant.scope, ()) for grant in self.grants)
        return wider or "" in own or (bool(names) and own.issuperset(names))

    @property
    def limited(self) -> bool:
        """Return True if the principal's right to call a method may depend on the request."""
        return not any(grant.scope in (Scope.ADMIN, Scope.FLEET) for grant in self.grants)


@dataclass(frozen=True)
class Identity:
    """An authenticated call.

    Attributes:
        principal: the calling principal.
        via: the gateway that speaks for the principal; "": the principal called directly.
        client, client_version, user: the calling program and its user, as stated by the caller. Not verified.
        host: the caller's host; "": unknown.
        traceparent: the caller's W3C trace context; "": absent.
    """

    principal: Principal
    via: str = ""
    client: str = ""
    client_version: str = ""
    user: str = ""
    host: str = ""
    traceparent: str = ""

    def caller(self) -> Caller:
        """Return the identity in the form of records."""
        return Caller(
            principal=self.principal.name,
            via=self.via,
            client=self.client,
            client_version=self.client_version,
            user=self.user,
        )


FLEET = Principal("fleet", frozenset({Grant(Scope.FLEET)}))
"""The bearer of the fleet's own token: the single token of ``--token-file``, RLCTL_TOKEN_FILE or RLCTL_TOKEN."""

ANONYMOUS = Principal("anonymous", frozenset({Grant(Scope.FLEET)}))
"""A caller of a server without tokens."""

COORDINATOR = "coordinator"
"""Principal of operations that the coordinator starts without a caller."""

DEFAULT = "default"
"""All principals without a quota of their own, in commands."""

RESERVED = frozenset({FLEET.name, ANONYMOUS.name, COORDINATOR, DEFAULT})

calling: ContextVar[Identity | None] = ContextVar("calling", default=None)
"""The call that the running task serves. None: no call; the process acts without a caller."""


def current_caller() -> Caller:
    identity = calling.get()
    return Caller(principal=COORDINATOR) if identity is None else identity.caller()


def current_traceparent() -> str:
    """Return the W3C trace context of the running task's caller, or ""."""
    identity = calling.get()
    return "" if identity is None else identity.traceparent
