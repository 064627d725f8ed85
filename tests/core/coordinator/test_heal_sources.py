"""Whence a stage gets what it lacks."""

from __future__ import annotations

from typing import cast

from test_versions import LATEST, fleet

from rlctl.command_stream.commander import Commander
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.healing.sources import Sources
from rlctl.v1.common_pb2 import STAGE_STATE_READY
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.verbs_pb2 import Adapter


def stage(name: str, *adapters: Adapter) -> Slot:
    """One that is at the latest version and sends to others."""
    sends = Capabilities(verbs=["SendWeights"])
    layout = StageLayout(store_host="127.0.0.1")
    registration = StageRegistration(slot=name, model="actor", layout=layout, capabilities=sends)
    there = cast(Commander, type("Link", (), {"lost": False})())
    report = StageReport(state=STAGE_STATE_READY, weight_version=LATEST, adapters=adapters)
    return Slot(SlotRecord(registration=registration), there, report)


def test_an_adapter_comes_from_a_stage_that_holds_that_very_one() -> None:
    known = Adapter(name="math", version="a", load_id="2")
    former, holder, lacks = stage("a", Adapter(name="math", version="a", load_id="1")), stage("b", known), stage("c")
    assert Sources(fleet(others=[former, holder, lacks])).holder(lacks, known) is holder
    assert Sources(fleet(others=[former, lacks])).holder(lacks, known) is None
