"""Identities in certificates: their form, and which identity may call which service."""

from __future__ import annotations

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.tls.identity import DATA_PORT, Identity, Role, only_identity, refusal, server_name

LAB = {role: Identity("lab", role, "" if role is Role.COORDINATOR else "a") for role in Role}
COORDINATOR, STAGE, WORKER = LAB[Role.COORDINATOR], LAB[Role.STAGE], LAB[Role.WORKER]
USERS = {Role.COORDINATOR, Role.GATEWAY, Role.TRAINER, Role.CLIENT}


@pytest.mark.parametrize("uri", ["rlctl://lab/coordinator", "rlctl://lab/stage/actor-0", "rlctl://l-1/client/a.b_c"])
def test_an_identity_is_a_uri(uri: str) -> None:
    assert str(Identity.of(uri)) == uri


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("spiffe://lab/coordinator", "does not begin with rlctl://"),
        ("rlctl://Lab/coordinator", "no DNS label"),
        ("rlctl:///coordinator", "no DNS label"),
        ("rlctl://lab/king", "'king' is not one of"),
        ("rlctl://lab/coordinator/2", "not of the form coordinator"),
        ("rlctl://lab/stage", "not of the form stage/NAME"),
        ("rlctl://lab/stage/a/b", "not of the form stage/NAME"),
        ("rlctl://lab/stage/..%2f", "not of the form stage/NAME"),
    ],
)
def test_another_uri_is_refused_with_its_reason(uri: str, why: str) -> None:
    with pytest.raises(RlctlError, match=why) as caught:
        Identity.of(uri)
    assert caught.value.reason is Reason.TLS_INVALID


def test_a_certificate_has_exactly_one_identity() -> None:
    assert only_identity(["https://x", "rlctl://lab/stage/a"]) == STAGE
    assert only_identity([]) is None
    assert only_identity(["rlctl://lab/stage/a", "rlctl://lab/coordinator"]) is None
    assert only_identity(["rlctl://lab/king"]) is None


def test_server_names_are_those_of_roles() -> None:
    assert STAGE.server_name == server_name("lab", Role.STAGE) == "stage.lab.rlctl.internal"


@pytest.mark.parametrize(
    ("server", "service", "method", "admitted"),
    [
        (COORDINATOR, "rlctl.v1.CoordinatorService", "GetFleet", USERS),
        (COORDINATOR, "rlctl.v1.CoordinatorService", "RegisterStage", {Role.STAGE}),
        (COORDINATOR, "rlctl.v1.CoordinatorService", "DeregisterStage", USERS | {Role.STAGE}),
        (STAGE, "rlctl.v1.StageService", "Control", {Role.COORDINATOR}),
        (STAGE, "rlctl.v1.RolloutService", "Generate", USERS),
        (STAGE, DATA_PORT, "", USERS),
        (WORKER, "rlctl.v1.WorkerService", "Control", {Role.STAGE}),
        (LAB[Role.TRAINER], "rlctl.v1.TrainerService", "Join", {Role.TRAINER, Role.COORDINATOR}),
        (STAGE, "grpc.health.v1.Health", "Check", set(Role)),
    ],
)
def test_each_service_admits_its_roles_only(server: Identity, service: str, method: str, admitted: set[Role]) -> None:
    assert {role for role, caller in LAB.items() if refusal(server, caller, service, method) is None} == admitted


def test_a_worker_obeys_its_own_stage_only() -> None:
    error = refusal(WORKER, Identity("lab", Role.STAGE, "b"), "rlctl.v1.WorkerService", "Control")
    assert error is not None
    assert error.reason is Reason.PEER_NOT_ALLOWED
    assert error.message == "rlctl://lab/stage/b is not the stage of rlctl://lab/worker/a"


def test_another_fleet_and_a_certificate_without_an_identity_are_refused() -> None:
    other = refusal(STAGE, Identity("prod", Role.COORDINATOR), "rlctl.v1.StageService", "Control")
    assert other is not None
    assert "rlctl://prod/coordinator is of another fleet than rlctl://lab/stage/a" in other.message
    nobody = refusal(STAGE, None, "grpc.health.v1.Health", "Check")
    assert nobody is not None
    assert nobody.reason is Reason.PEER_NOT_ALLOWED
