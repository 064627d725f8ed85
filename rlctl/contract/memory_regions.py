"""Memory regions of engines: the regions of a release, and whether the content of the weights is kept."""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_SKIPPED, MemoryTag
from rlctl.v1.fleet_pb2 import Capabilities
from rlctl.v1.results_pb2 import RankResult
from rlctl.v1.verbs_pb2 import ReleaseMemoryRequest


def keeps_weights(request: ReleaseMemoryRequest) -> bool:
    """Return True if a request releases the weights and asks to keep their content."""
    return request.keep_weights and (not request.tags or MEMORY_TAG_WEIGHTS in request.tags)


def unkept(capabilities: Capabilities, request: ReleaseMemoryRequest) -> RlctlError | None:
    """Return the error of an engine that cannot keep the released weights of this request, or None."""
    if not keeps_weights(request) or capabilities.keeps_weights:
        return None
    return Reason.UNSUPPORTED.error(
        "the engine does not keep its weights while their memory is released",
        field="keep_weights",
        next_step="Release the weights without keep_weights, and heal or update the stage after the "
        "resume. SGLang keeps weights if started with enable_weights_cpu_backup.",
        outcome=OUTCOME_SKIPPED,
    )


def released(results: Sequence[RankResult]) -> frozenset[MemoryTag.ValueType]:
    """Return the regions that at least one rank reports as released."""
    return frozenset(tag for result in results for tag in result.memory.released)


def kept(results: Sequence[RankResult]) -> frozenset[MemoryTag.ValueType]:
    """Return the regions with content kept by every rank. A server engine reports once for all ranks."""
    reports = [frozenset(result.memory.kept) for result in results if result.HasField("memory")]
    return frozenset.intersection(*reports) if reports else frozenset()
