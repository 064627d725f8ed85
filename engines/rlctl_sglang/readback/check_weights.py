"""The checker: SGLang's checksums of every rank, and the model digest where it can be had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.updates.dirty_label import Marking

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import EVIDENCE_RANK, OUTCOME_APPLIED, OUTCOME_SKIPPED, OUTCOME_UNKNOWN, WorkerCoordinates
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_PROBE,
    CHECK_ACTION_READ,
    CHECK_ACTION_RESET_TENSORS,
    CheckAction,
    CheckReport,
    CheckWeightsRequest,
    TensorValues,
)
from rlctl.weights.shards.first_rows import rows_of, unknown, values_of
from rlctl.weights.tensor.tensors import TensorMeta
from rlctl_sglang.readback.readback import Found, Readback
from rlctl_sglang.requests.probe import Prober


class Checker:
    """Checks the weights of one server. Each rank's checksum is its own: evidence RANK."""

    def __init__(
        self,
        control: Control,
        readback: Readback | None,
        prober: Prober | None,
        workers: Sequence[WorkerCoordinates],
        marking: Marking,
        reference: Mapping[str, TensorMeta],
    ) -> None:
        """``readback``: None where the model digest cannot be had; ``prober``: None where nothing may be probed;
        ``reference``: every tensor by checkpoint name.
        """
        self._control = control
        self._marking = marking
        self._readback = readback
        self._prober = prober
        self._workers = workers
        self._reference = reference

    @property
    def actions(self) -> list[CheckAction.ValueType]:
        """What can be asked for."""
        probing = [CHECK_ACTION_PROBE] if self._prober else []
        return [CHECK_ACTION_CHECKSUM, CHECK_ACTION_RESET_TENSORS, CHECK_ACTION_READ, *probing]

    async def check(self, request: CheckWeightsRequest, call: Call) -> list[RankResult] | CheckReport:
        """One report for each rank; of a probe one for all. Raises UNSUPPORTED (SKIPPED), DIGEST_MISMATCH."""
        action = request.action or CHECK_ACTION_CHECKSUM
        if action == CHECK_ACTION_PROBE and self._prober is not None:
            return CheckReport(action=action, probed=await self._prober.probe(request.prompts, call))
        if action == CHECK_ACTION_READ:
            return CheckReport(action=action, values=await self._read(request, call))
        if action not in self.actions:
            name = CheckAction.Name(action) if action in CheckAction.values() else action
            raise Reason.UNSUPPORTED.error(
                f"SGLang's checker is not driven to {name}", field="action", outcome=OUTCOME_SKIPPED
            )
        for field in ("per_tensor", "fingerprints", "expected_digest"):
            if not getattr(request, field):
                continue
            if self._readback is None:
                raise Reason.UNSUPPORTED.error("what this server holds cannot be read", field=field)
            if request.skip_tensors:
                raise Reason.UNSUPPORTED.error("what is read are all tensors", field="skip_tensors")
        if action == CHECK_ACTION_RESET_TENSORS:
            await self._marking.spoil(call)
            # Whatever comes of it, something may have been scrambled.
            await self._control.must(
                "/weights_checker", {"action": "reset_tensors"}, call=call, outcome=OUTCOME_UNKNOWN
            )
        body = {"action": "checksum", "skip_tensor_list": list(request.skip_tensors) or None}
        told = await self._control.ask("/weights_checker", body, call=call)
        wants = request.model_digest if request.HasField("model_digest") else True
        wants |= bool(request.expected_digest or request.fingerprints or request.per_tensor)
        found = Found("", {}, ())
        if self._readback is not None and wants and not request.skip_tensors:
            found = await self._readback.digest(call, request.fingerprints)
        digest = found.digest
        if request.expected_digest and digest != request.expected_digest:
            raise Reason.DIGEST_MISMATCH.error(
                f"the model digest is {digest}, {request.expected_digest} was expected",
                field="expected_digest",
                metadata={"expected": request.expected_digest, "found": digest},
            )
        ranks = told.get("ranks") or []
        if len(ranks) != len(self._workers):
            raise Reason.ANSWER_INVALID.error(f"SGLang's checker told of {len(ranks)} ranks, not {len(self._workers)}")
        results = [self._result(action, rank, found) for rank in ranks]
        if request.per_tensor and self._readback is not None:
            results[0].check.model_tensors.extend(self._readback.listed(found))  # this process has hashed them all
        return results

    async def _read(self, request: CheckWeightsRequest, call: Call) -> TensorValues:
        """The rows as SGLang's own route gives them: of a cut tensor its rank 0's, which are the first."""
        meta = self._reference.get(request.tensor)
        if meta is None:
            raise unknown(request.tensor)
        rows = rows_of(request, meta)
        body = {"name": meta.name, "truncate_size": rows}
        try:
            told = await self._control.ask("/get_weights_by_name", body, call=call)
        except RlctlError as error:
            if error.reason is not Reason.ENGINE_FAILED:
                raise
            raise Reason.UNSUPPORTED.error(
                f"SGLang gives no values of {meta.name}: {error.message}",
                field="tensor",
                next_step="SGLang's log says why. SGLang has code for this in models of the Llama kind, not in all.",
            ) from None
        try:
            values = torch.tensor(told, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            raise Reason.ANSWER_INVALID.error(f"SGLang does not give {meta.name} as numbers") from None
        values = values[0] if values.dim() > len(meta.shape) else values  # an answer of each data-parallel rank
        if values.shape[1:] != meta.shape[1:]:
            raise Reason.ANSWER_INVALID.error(
                f"SGLang gives {meta.name} with rows of shape {tuple(values.shape[1:])} instead of {meta.shape[1:]}"
            )
        return values_of(meta, values[:rows])

    def _result(self, action: CheckAction.ValueType, told: dict[str, object], found: Found) -> RankResult:
        checksums, places = told.get("checksums"), told.get("parallelism_info")
        assert isinstance(checksums, dict)
        assert isinstance(places, list)
        number = int(places[0].get("rank", 0))
        result = RankResult(
            coordinates=next(worker for worker in self._workers if worker.rank == number),
            outcome=OUTCOME_APPLIED,
            evidence=EVIDENCE_RANK,
            check=CheckReport(
                action=action,
                tensor_count=len(checksums),
                rank_digest=str(told.get("per_gpu_checksum")),
                model_digest="" if action == CHECK_ACTION_RESET_TENSORS else found.digest,
                inconsistent=found.inconsistent,
            ),
        )
        if found.differences:
            result.check.difference.CopyFrom(found.differences[number])
        return result
