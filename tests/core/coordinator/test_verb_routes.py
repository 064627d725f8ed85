"""The table of routes has rows of verbs that the coordinator offers."""

from __future__ import annotations

from rlctl.contract.verbs import VERBS, offered_by
from rlctl.coordinator.verbs.routes import ROUTES, route_of
from rlctl.v1.verbs_pb2 import GetLoadsRequest, PauseGenerationRequest


def test_a_row_is_of_a_verb_that_the_coordinator_offers() -> None:
    assert set(ROUTES) <= {verb.name for verb in offered_by("CoordinatorService")}


def test_only_verbs_with_an_adapter_have_a_route_of_it() -> None:
    named = {name for name in ROUTES if "adapter" in VERBS[name].request.DESCRIPTOR.fields_by_name}
    assert {name for name, route in ROUTES.items() if route.of_adapter} <= named


def test_a_request_takes_the_route_of_its_verb_and_adapter() -> None:
    pause = ROUTES["PauseGeneration"]
    assert route_of(PauseGenerationRequest()) is pause
    assert route_of(PauseGenerationRequest(adapter="math")) is pause.of_adapter
    assert not route_of(GetLoadsRequest()).by_name
