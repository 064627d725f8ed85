"""Whether the targets of an update hold what was sent: levels, and what the digests prove. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlctl.coordinator.roster import Slot
from rlctl.errors import Reason, RlctlError
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_UNSPECIFIED,
    VerificationLevel,
)
from rlctl.v1.results_pb2 import StageResult


def digests(slot: Slot) -> bool:
    """Whether a stage can digest its weights."""
    return any(
        level in slot.capabilities.verification for level in (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_REPLICA)
    )


def refuse_unreachable(wanted: VerificationLevel.ValueType, targets: Sequence[Slot]) -> None:
    """Raise VERIFICATION_UNREACHABLE, naming the target, when a level asked for by name cannot be reached there."""
    if wanted in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_NONE):
        return
    if wanted == VERIFICATION_LEVEL_REPLICA and len(targets) == 1:
        raise Reason.VERIFICATION_UNREACHABLE.error(
            f"{targets[0].name} is the only target: it has no replica to agree with", field="options.verify"
        )
    for slot in targets:
        if wanted not in slot.capabilities.verification:
            reached = ", ".join(_name(level) for level in slot.capabilities.verification) or "none"
            raise Reason.VERIFICATION_UNREACHABLE.error(
                f"{slot.name} cannot verify at level {_name(wanted)}; it reaches: {reached}",
                field="options.verify",
            )


def levels(
    wanted: VerificationLevel.ValueType, targets: Sequence[Slot], expected_digest: str
) -> dict[str, VerificationLevel.ValueType]:
    """At which level each target is verified, by slot. AUTO takes the highest that it reaches; a single target has no
    replica to agree with.

    Raises FIELD_REQUIRED when ``expected`` was asked for by name and the source gave no digest.
    """
    if wanted == VERIFICATION_LEVEL_EXPECTED and not expected_digest:
        raise Reason.FIELD_REQUIRED.error("verify=expected needs the sources' digest", field="expected_digest")

    def highest(slot: Slot) -> VerificationLevel.ValueType:
        reached = slot.capabilities.verification
        if expected_digest and VERIFICATION_LEVEL_EXPECTED in reached:
            return VERIFICATION_LEVEL_EXPECTED
        replicas = VERIFICATION_LEVEL_REPLICA in reached and len(targets) > 1
        return VERIFICATION_LEVEL_REPLICA if replicas else VERIFICATION_LEVEL_NONE

    return {slot.name: wanted or highest(slot) for slot in targets}


def judge(
    results: Sequence[StageResult], levels: Mapping[str, VerificationLevel.ValueType], expected_digest: str
) -> dict[str, RlctlError]:
    """What is wrong with each target, by slot; those that are right are not in it.

    Every rank of a target must name the same model digest, without an inconsistent replica. At level expected it must
    be the source's. At level replica all targets must agree; when they do not, nobody can say which is right.
    """
    wrong: dict[str, RlctlError] = {}
    found: dict[str, str] = {}
    for result in results:
        try:
            found[result.slot] = _digest(result)
        except RlctlError as error:
            wrong[result.slot] = error
    replicas = {digest for slot, digest in found.items() if levels[slot] == VERIFICATION_LEVEL_REPLICA}
    for slot, digest in found.items():
        if levels[slot] == VERIFICATION_LEVEL_EXPECTED and digest != expected_digest:
            wrong[slot] = Reason.DIGEST_MISMATCH.error(
                f"its weights have digest {digest[:16]}, the source sent {expected_digest[:16]}",
                metadata={"digest": digest, "expected": expected_digest},
                outcome=OUTCOME_DIRTY,
            )
        elif levels[slot] == VERIFICATION_LEVEL_REPLICA and len(replicas) > 1:
            wrong[slot] = Reason.DIGEST_MISMATCH.error(
                f"the replicas hold {len(replicas)} different sets of weights; this one's digest is {digest[:16]}",
                metadata={"digest": digest},
                outcome=OUTCOME_DIRTY,
            )
    return wrong


def _digest(result: StageResult) -> str:
    if result.outcome != OUTCOME_APPLIED:
        outcome = result.outcome if result.outcome == common_pb2.OUTCOME_UNKNOWN else OUTCOME_DIRTY
        raise Reason.DIGEST_MISMATCH.error(
            f"its weights could not be digested: {result.error.message}", outcome=outcome
        )
    found = {rank.check.model_digest for rank in result.rank_results}
    inconsistent = sorted({name for rank in result.rank_results for name in rank.check.inconsistent})
    if inconsistent:
        raise Reason.DIGEST_MISMATCH.error(
            f"replicas of {inconsistent[0]} differ between its ranks ({len(inconsistent)} tensors do)",
            metadata={"tensors": ",".join(inconsistent)},
            outcome=OUTCOME_DIRTY,
        )
    if len(found) != 1 or not next(iter(found)):
        raise Reason.DIGEST_MISMATCH.error("its ranks do not name one model digest", outcome=OUTCOME_DIRTY)
    return found.pop()


def _name(level: VerificationLevel.ValueType) -> str:
    return VerificationLevel.Name(level).removeprefix("VERIFICATION_LEVEL_").lower()
