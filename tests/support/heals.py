"""Checks of a stage after a heal."""

from __future__ import annotations

import time
from typing import Any

from digests import holds

import rlctl
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, Operation, StageResult

PATIENCE_S = 30.0


def ended(fleet: Fleet, operation_id: str) -> Operation:
    """Wait for the end of an operation: a healed stage is routable before."""
    deadline = time.monotonic() + PATIENCE_S
    while (operation := fleet.operation(operation_id)).state == OPERATION_STATE_RUNNING:
        assert time.monotonic() < deadline, operation
        time.sleep(0.02)
    return operation


def check_healed(fleet: Fleet, slot: str, model: Any, ranks: int = 1) -> StageResult:
    """Check that a stage's last heal brought these weights from another stage. Return the result of the heal.

    The heal is verified at level expected, and every rank answers for itself.
    """
    heal = ended(fleet, next(heal.operation_id for heal in fleet.operations(verb="HealStage") if slot in heal.targets))
    assert heal.state == OPERATION_STATE_OK, heal
    (healed,) = heal.stage_results
    assert (healed.verified, healed.evidence) == (common.VERIFICATION_LEVEL_EXPECTED, common.EVIDENCE_VERIFIED)
    assert len(healed.rank_results) == ranks
    assert all(rank.weights.bytes_received for rank in healed.rank_results), healed
    stage = next(stage for stage in fleet.status().stages if stage.registration.slot == slot)
    assert stage.routable
    assert holds([stage.report.model_digest], model)
    assert stage.report.weight_version == fleet.status().models[0].latest
    (checked,) = fleet.call(v.CheckWeightsRequest(), slots=[slot]).stage_results
    answers = [(rank.evidence, rank.check.model_digest) for rank in checked.rank_results]
    assert answers == [(common.EVIDENCE_RANK, rlctl.model_digest(model))] * ranks
    return healed
