"""The scope of every RPC, and the one decision whether a principal may make a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Principal, Scope
from rlctl.contract.verbs import offered_by

CHANGES = (Scope.ROLLOUT, Scope.WEIGHTS, Scope.ADAPTERS)
"""Scopes of callers that change something; the verb decides which scope suffices."""

FOLLOWS = (Scope.ROLLOUT, Scope.GATEWAY)
"""Scopes of routing followers (``WatchFleetRequest.watch_id``). The coordinator waits for their confirmation."""

_VIEW = (Scope.VIEWER,)
_UPDATE = (Scope.WEIGHTS, Scope.ADAPTERS)
_ADMIN = (Scope.ADMIN,)
_FLEET = (Scope.FLEET,)

COORDINATOR_RPCS: Mapping[str, tuple[Scope, ...]] = {
    **{verb.name: verb.scopes for verb in offered_by("CoordinatorService")},
    "RegisterStage": _FLEET,
    "DeregisterStage": _FLEET,
    "ReportEngineFailure": _FLEET,
    "BeginWeightUpdate": _UPDATE,
    "JoinWeightUpdate": _UPDATE,
    "RetryWeightUpdate": _UPDATE,
    "CommitWeightUpdate": _UPDATE,
    "CommitBatch": _UPDATE,
    "AbortWeightUpdate": _UPDATE,
    "RenewLease": _UPDATE,
    "CancelOperation": _UPDATE,
    "ReserveRequestId": CHANGES,
    "GetOperation": _VIEW,
    "ListOperations": _VIEW,
    "WatchOperation": _VIEW,
    "ListAuditRecords": _ADMIN,
    "GetFleet": _VIEW,
    "ListVersions": _VIEW,
    "WatchFleet": _VIEW,
    "ConfirmFleet": FOLLOWS,
    "SetStageEnabled": _ADMIN,
    "AdmitSlots": _ADMIN,
    "TakeOverStages": _ADMIN,
    "SetHealing": _ADMIN,
    "SetMinHealthy": _ADMIN,
    "HealStage": _ADMIN,
    "BackupJournal": _ADMIN,
}
"""Scopes of the coordinator's RPCs. Each listed scope suffices. The scopes of verbs are in the table of verbs."""

AUDITED = frozenset(
    {
        *("AbortWeightUpdate", "CancelOperation", "DeregisterStage"),
        *("SetStageEnabled", "AdmitSlots", "TakeOverStages", "SetHealing", "SetMinHealthy", "BackupJournal"),
    }
)
"""RPCs of the coordinator that are audited without being operations. Every operation is audited."""

_SERVICES: Mapping[str, tuple[Scope, ...]] = {
    "rlctl.v1.StageService": _FLEET,
    "rlctl.v1.WorkerService": _FLEET,
    "rlctl.v1.TrainerService": _FLEET,
    "rlctl.v1.RolloutService": (Scope.ROLLOUT,),
    "grpc.health.v1.Health": _VIEW,
    "grpc.reflection.v1alpha.ServerReflection": _VIEW,
}
"""Scopes of all methods of a service."""


@dataclass(frozen=True)
class Method:
    """A method of a server, or a route of HTTP. Each of the scopes suffices."""

    name: str
    scopes: tuple[Scope, ...]


@dataclass(frozen=True)
class Subject:
    """Models and adapter of a request. ``adapter`` "": the request concerns no single adapter."""

    models: frozenset[str] = frozenset()
    adapter: str = ""


def method_of(path: str) -> Method:
    """Return the method of a gRPC path, ``/rlctl.v1.CoordinatorService/GetFleet``. An unknown method needs FLEET."""
    service, _, name = path.removeprefix("/").rpartition("/")
    if service == "rlctl.v1.CoordinatorService":
        return Method(name, COORDINATOR_RPCS.get(name, _FLEET))
    return Method(name, _SERVICES.get(service, _FLEET))


def refusal(principal: Principal, method: Method, subject: Subject | None = None) -> RlctlError | None:
    """Return the error SCOPE_MISSING for a principal without the right to make this call, else None.

    ``subject`` None: the request is unread, or concerns no part of the fleet. A scope limited to any name then
    suffices.
    """
    if any(_suffices(principal, scope, subject) for scope in method.scopes):
        return None
    needed = [text for scope in method.scopes for text in _needed(scope, subject)]
    owned_scopes = ", ".join(sorted(map(str, principal.grants))) or "no scope"
    needed_scopes = " or ".join(needed)
    return Reason.SCOPE_MISSING.error(
        f"{principal.name} has {owned_scopes}; {method.name} needs {needed_scopes}",
        metadata={"principal": principal.name, "has": owned_scopes, "needs": needed_scopes, "method": method.name},
    )


def _suffices(principal: Principal, scope: Scope, subject: Subject | None) -> bool:
    if subject is None or not scope.named:
        return principal.has(scope)
    if scope is Scope.WEIGHTS:
        return principal.covers(scope, subject.models)
    return bool(subject.adapter) and principal.covers(scope, {subject.adapter})


def _needed(scope: Scope, subject: Subject | None) -> list[str]:
    if subject is None or not scope.named:
        return [scope.value]
    if scope is Scope.WEIGHTS:
        return [" and ".join(f"weights:{model}" for model in sorted(subject.models)) or scope.value]
    return [f"adapters:{subject.adapter}"] if subject.adapter else []
