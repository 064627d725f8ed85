"""Scopes: every RPC has one, and each scope allows what its row says and nothing else."""

from __future__ import annotations

import importlib

import pytest

from rlctl.contract.access import COORDINATOR_RPCS, Method, Subject, method_of, refusal
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import ANONYMOUS, FLEET, Grant, Principal, Scope
from rlctl.v1 import coordinator_pb2, rollout_pb2, stage_pb2, trainer_pb2, worker_pb2

COORDINATOR = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]

ACTOR = Subject(frozenset({"actor"}))
BOTH = Subject(frozenset({"actor", "critic"}))
MATH = Subject(frozenset({"actor"}), "math")

VIEW = {
    *("GetModelInfo", "GetServerInfo", "GetLoads", "ListAdapters"),
    *("GetOperation", "ListOperations", "WatchOperation", "GetFleet", "ListVersions", "WatchFleet"),
}
WEIGHTS = {
    *("FlushCache", "ReleaseMemory", "ResumeMemory"),
    *("UpdateWeightsFromDisk", "PullWeights", "InspectCheckpoint", "CheckWeights"),
}
UPDATE = {
    *("PauseGeneration", "ContinueGeneration", "LoadAdapter", "UnloadAdapter"),
    *("UpdateWeightsFromTensor", "UpdateWeightsFromDistributed"),
    *("InitWeightsUpdateGroup", "DestroyWeightsUpdateGroup"),
    *("BeginWeightUpdate", "JoinWeightUpdate", "RetryWeightUpdate", "CommitWeightUpdate", "CommitBatch"),
    *("AbortWeightUpdate", "RenewLease", "CancelOperation"),
}
ADMIN = {
    "SetStageEnabled",
    "AdmitSlots",
    "TakeOverStages",
    "SetHealing",
    "SetMinHealthy",
    "HealStage",
    "BackupJournal",
    "ListAuditRecords",
}
OF_PROCESSES = {"RegisterStage", "DeregisterStage", "ReportEngineFailure"}
ALL = {*VIEW, *WEIGHTS, *UPDATE, *ADMIN, *OF_PROCESSES, "AbortRequests", "ReserveRequestId", "ConfirmFleet"}

ALLOWED = {
    "viewer": VIEW,
    "rollout": VIEW | {"AbortRequests", "ReserveRequestId", "ConfirmFleet"},
    "weights": VIEW | WEIGHTS | UPDATE | {"AbortRequests", "ReserveRequestId"},
    "weights:actor": VIEW | WEIGHTS | UPDATE | {"AbortRequests", "ReserveRequestId"},
    "weights:critic": VIEW | {"ReserveRequestId"},
    "adapters": VIEW | {"ReserveRequestId"},
    "adapters:math": VIEW | {"ReserveRequestId"},
    "admin": ALL - OF_PROCESSES,
    "gateway": VIEW | {"ConfirmFleet"},
    "fleet": ALL,
}
"""RPCs of the coordinator that a token of one scope may call for model "actor" as a whole."""


def principal(*scopes: str) -> Principal:
    return Principal("ci", frozenset(map(Grant.parse, scopes)))


def allowed(who: Principal, subject: Subject | None) -> set[str]:
    about = {name: None if name == "ReserveRequestId" else subject for name in COORDINATOR_RPCS}
    return {
        name for name, scopes in COORDINATOR_RPCS.items() if refusal(who, Method(name, scopes), about[name]) is None
    }


def test_every_rpc_of_the_coordinator_has_a_scope() -> None:
    assert COORDINATOR_RPCS.keys() == set(COORDINATOR.methods_by_name), (
        "an RPC that is no verb needs scopes in rlctl/contract/access.py"
    )
    assert set(COORDINATOR.methods_by_name) == ALL, (
        "add each RPC to the set above that fits its scopes; a verb's scopes are in its row of the verb table"
    )


def test_every_rpc_of_every_service_has_a_scope_of_its_own_choice() -> None:
    services = {
        "rlctl.v1.StageService": Scope.FLEET,
        "rlctl.v1.WorkerService": Scope.FLEET,
        "rlctl.v1.TrainerService": Scope.FLEET,
        "rlctl.v1.RolloutService": Scope.ROLLOUT,
    }
    files = (coordinator_pb2, rollout_pb2, stage_pb2, trainer_pb2, worker_pb2)
    there = {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}
    assert there == {*services, COORDINATOR.full_name}, "a new service needs scopes in rlctl/contract/access.py"
    for file in files:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods_by_name:
                scopes = method_of(f"/{service.full_name}/{method}").scopes
                assert (
                    scopes == COORDINATOR_RPCS.get(method) if service is COORDINATOR else (services[service.full_name],)
                )


def test_probes_and_reflection_are_for_viewers_and_unknown_methods_for_the_fleet() -> None:
    health = importlib.import_module("grpc_health.v1.health").SERVICE_NAME
    reflection = importlib.import_module("grpc_reflection.v1alpha.reflection").SERVICE_NAME
    assert method_of(f"/{health}/Watch").scopes == method_of(f"/{reflection}/ServerReflectionInfo").scopes
    assert method_of(f"/{health}/Watch").scopes == (Scope.VIEWER,)
    for unknown in ("/rlctl.v1.CoordinatorService/Nothing", "/other.Service/GetFleet", "GetFleet", ""):
        assert method_of(unknown).scopes == (Scope.FLEET,)


@pytest.mark.parametrize("scope", ALLOWED)
def test_a_scope_allows_its_rows(scope: str) -> None:
    assert allowed(principal(scope), ACTOR) == ALLOWED[scope]


def test_scopes_add_up() -> None:
    assert allowed(principal("viewer", "weights:actor", "rollout"), ACTOR) == ALLOWED["weights"] | {"ConfirmFleet"}
    assert allowed(principal(), ACTOR) == set()
    assert allowed(FLEET, BOTH) == allowed(ANONYMOUS, BOTH) == ALL


def test_weights_of_one_model_are_not_those_of_another() -> None:
    assert allowed(principal("weights:actor"), BOTH) == VIEW | {"ReserveRequestId"}
    assert allowed(principal("weights:actor", "weights:critic"), BOTH) == ALLOWED["weights"]


def test_a_scope_for_named_models_does_not_cover_a_fleet_without_models() -> None:
    assert not Principal("x", frozenset({Grant.parse("weights:actor")})).covers(Scope.WEIGHTS, set())
    assert Principal("x", frozenset({Grant.parse("weights")})).covers(Scope.WEIGHTS, set())
    assert Principal("x", frozenset({Grant.parse("admin")})).covers(Scope.WEIGHTS, set())


def test_an_adapter_is_written_with_its_own_scope_or_that_of_its_model() -> None:
    for scope in ("adapters", "adapters:math"):
        assert allowed(principal(scope), MATH) == VIEW | UPDATE | {"ReserveRequestId"}
        assert allowed(principal(scope), ACTOR) == VIEW | {"ReserveRequestId"}, "not the model's weights"
    assert allowed(principal("adapters:code"), MATH) == VIEW | {"ReserveRequestId"}
    assert allowed(principal("weights:actor"), MATH) == ALLOWED["weights"]


def test_before_the_request_is_read_only_hopeless_calls_are_refused() -> None:
    begin = Method("BeginWeightUpdate", COORDINATOR_RPCS["BeginWeightUpdate"])
    assert refusal(principal("adapters:math"), begin) is None
    assert refusal(principal("rollout"), begin) is not None


def test_a_refusal_says_what_is_missing_and_what_to_do() -> None:
    error = refusal(principal("viewer"), Method("PauseGeneration", COORDINATOR_RPCS["PauseGeneration"]), MATH)
    assert error is not None
    assert (error.reason, error.status, error.http_status) == (Reason.SCOPE_MISSING, "PERMISSION_DENIED", 403)
    assert error.message == "ci has viewer; PauseGeneration needs weights:actor or adapters:math"
    assert error.metadata["needs"] == "weights:actor or adapters:math"
    assert "rlctl tokens new" in error.next_step


@pytest.mark.parametrize("text", ["", "root", "viewer:actor", "weights:", "Admin"])
def test_a_scope_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(RlctlError) as caught:
        Grant.parse(text)
    assert caught.value.reason is Reason.FIELD_INVALID


def test_a_name_of_a_scope_may_have_colons_and_slashes() -> None:
    grant = Grant.parse("weights:org/model:v2")
    assert (grant.scope, grant.name, str(grant)) == (Scope.WEIGHTS, "org/model:v2", "weights:org/model:v2")
