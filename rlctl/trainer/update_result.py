"""The result of a published update, for the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.contract.outcomes import acknowledged
from rlctl.v1.common_pb2 import Verification, WeightVersion
from rlctl.v1.results_pb2 import Operation


@dataclass(frozen=True)
class UpdateResult:
    """A published update.

    Attributes:
        version: label and sequence that the fleet serves now; of the base weights, when an adapter was updated.
        operation: the operation with a result for every rank of every target.
        model_digest: hex digest of the full weights that every verified target holds; "" when none was verified, and
            for an adapter, whose digest stands in the operation.
        bytes_sent: bytes that left this source.
        tensors_sent: tensors that left it; of a delta those that differ from its base.
        transfer_s: from the first tensor to the last byte sent, seconds.
        pause_s: from the first target's pause to the last one's resume, as the coordinator saw it, seconds.
        total_s: the whole call, seconds.
    """

    version: WeightVersion
    operation: Operation
    model_digest: str
    bytes_sent: int
    tensors_sent: int
    transfer_s: float
    pause_s: float
    total_s: float

    @property
    def verification(self) -> Verification:
        """The weakest level of each kind among the targets that confirmed: ``held`` of the bytes at their ranks,
        ``computed`` of the values that they compute. The operation has the levels of each target.
        """
        return self.operation.verification

    @property
    def left_out(self) -> dict[str, str]:
        """Stages of the model that the version has not come to, by slot, and why. They serve nothing until they are
        healed.
        """
        results = self.operation.stage_results
        failed = {each.slot: each.error.message for each in results if not acknowledged(each, update=True)}
        return {each.slot: each.reason for each in self.operation.excluded} | failed
