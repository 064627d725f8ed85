"""The table of verbs agrees with the services of the contract."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from rlctl.contract.verbs import VERBS, offered_by
from rlctl.v1 import coordinator_pb2, results_pb2, stage_pb2, worker_pb2

STAGE: ServiceDescriptor = stage_pb2.DESCRIPTOR.services_by_name["StageService"]
WORKER: ServiceDescriptor = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
COORDINATOR: ServiceDescriptor = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]


@pytest.mark.parametrize("service", [STAGE, WORKER], ids=lambda service: service.name)
def test_every_rpc_has_a_row_and_every_row_an_rpc(service: ServiceDescriptor) -> None:
    assert set(service.methods_by_name) - {"Control"} == set(VERBS), (
        f"{service.name} in protos/ and the rows of rlctl/contract/verbs.py differ: CONTRIBUTING.md, Add a verb"
    )


def test_the_coordinator_has_an_rpc_for_every_verb_that_it_offers() -> None:
    offered = {verb.name for verb in offered_by("CoordinatorService")}
    assert offered == set(COORDINATOR.methods_by_name) & set(VERBS)


@pytest.mark.parametrize("service", [STAGE, WORKER], ids=lambda service: service.name)
@pytest.mark.parametrize("name", VERBS)
def test_an_rpc_has_the_messages_of_its_row(service: ServiceDescriptor, name: str) -> None:
    method = service.methods_by_name[name]
    assert method.input_type.full_name == VERBS[name].request.DESCRIPTOR.full_name
    assert method.output_type.name == {"StageService": "StageResult", "WorkerService": "RankResult"}[service.name]


def test_the_data_of_a_verb_is_a_field_of_a_rank_result_and_every_field_has_a_verb() -> None:
    fields = {field.name for field in results_pb2.RankResult.DESCRIPTOR.oneofs_by_name["data"].fields}
    assert {verb.data for verb in VERBS.values()} - {""} == fields, (
        "each field of `data` in RankResult is named by a row of rlctl/contract/verbs.py, and the reverse"
    )
