"""The result of a published update, for the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlctl.contract.outcomes import acknowledged
from rlctl.v1.common_pb2 import Verification, WeightVersion
from rlctl.v1.results_pb2 import Operation


@dataclass(frozen=True)
class UpdateResult:
    """A published update.

    Attributes:
        version: label and sequence that the fleet serves now. For an adapter update, of the base weights.
        operation: the operation with a result for every rank of every target.
        model_digest: model digest of the full weights at every verified target, "HEX@KEY" or "HEX" (docs/digests.md).
            "" if no target was verified. "" for an adapter: the operation has its digest.
        bytes_sent: bytes sent by this source.
        tensors_sent: tensors sent by this source. Of a delta, the tensors that differ from the base.
        transfer_s: seconds from the first tensor to the last byte sent.
        pause_s: seconds from the first target's pause to the last target's resume, as measured by the coordinator.
        total_s: seconds of the whole call.
    """

    version: WeightVersion
    operation: Operation = field(repr=False)
    model_digest: str
    bytes_sent: int
    tensors_sent: int
    transfer_s: float
    pause_s: float
    total_s: float

    @property
    def verification(self) -> Verification:
        """Return the weakest level of each kind among the targets that confirmed.

        ``held`` covers the bytes at the ranks, ``computed`` the values that engines compute. The operation has the
        levels of each target.
        """
        return self.operation.verification

    @property
    def left_out(self) -> dict[str, str]:
        """Return the stages of the model without the version, by slot, with the reason.

        These stages serve nothing until healed.
        """
        results = self.operation.stage_results
        failed = {entry.slot: entry.error.message for entry in results if not acknowledged(entry, update=True)}
        return {entry.slot: entry.reason for entry in self.operation.excluded} | failed
