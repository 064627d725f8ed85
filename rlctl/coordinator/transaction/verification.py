"""Commands the targets of an update to prove their weights before the version is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlctl.contract.digests import key_of
from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import fingerprints
from rlctl.coordinator.fleet.capabilities import can_digest
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import Expected, Level
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    VERIFICATION_LEVEL_DECODE,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_UNSPECIFIED,
)
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_DECODE,
    CHECK_ACTION_PROBE,
    DIGEST_FUNCTION_KEYED,
    DIGEST_FUNCTION_SHA256,
    CheckWeightsRequest,
)


@dataclass(frozen=True)
class Verdict:
    """The result of a verification.

    Attributes:
        wrong: error of each failed target, by slot.
        checks: results of the targets that were compared tensor by tensor, by slot, with each rank's part of the first
            difference.
        digest: model digest of all other targets, hex; "" if there is no digest or more than one.
        decode: targets that passed the decode check, by slot.
    """

    wrong: dict[str, RlctlError]
    checks: dict[str, StageResult]
    digest: str
    decode: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Computed:
    """The result of the probe and the decode check.

    Attributes:
        wrong: error of each failed target, by slot.
        decode: targets that passed the decode check, by slot.
    """

    wrong: dict[str, RlctlError]
    decode: frozenset[str]


LEAST_CHECK_S = 5.0
PATIENCE = 10.0
"""Time limit of a decode check that the update does not request: PATIENCE times its time at the engine's start, and at
least LEAST_CHECK_S. A busy server computes other requests meanwhile."""

NOTHING_COMPUTED = Computed({}, frozenset())


async def verify(
    update: Update,
    slots: Sequence[Slot],
    completed: Sequence[StageResult],
    levels: Mapping[str, Level],
    expected: Expected,
) -> Verdict:
    """Verify the committed weights of targets, or the sealed shadow copies of a staged update.

    ``completed``: results of that commit or seal, in the order of the slots.
    """

    def at(*selected: Level) -> list[Slot]:
        return [slot for slot in slots if levels[slot.name] in selected]

    options = update.record.request.options
    # With AUTO, the ranks of a target must agree even without any other digest to compare with.
    auto = verification_levels.of_bytes(options) == VERIFICATION_LEVEL_UNSPECIFIED
    digested = slots if auto else at(VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_REPLICA)
    results = await update.step(_check(update, expected), [slot for slot in digested if can_digest(slot)])
    errors = verification_levels.judge_digests(results, levels, expected)
    checks = await _compared(update, results, errors, expected)
    for slot, answer in checks.items():
        errors[slot] = verification_levels.named(errors[slot], answer)
    errors |= verification_levels.judge_evidence(completed, levels, probed=options.HasField("probe"))
    receivers = {slot.name for slot in at(VERIFICATION_LEVEL_RECEIVED)}
    errors |= verification_levels.judge_received([result for result in completed if result.slot in receivers], expected)
    update.timeline.fail(errors, levels)
    values = NOTHING_COMPUTED if update.staged else await compute(update, slots)
    errors |= values.wrong
    digests = {r.rank_results[0].check.model_digest for r in results if r.slot not in errors and r.rank_results}
    return Verdict(errors, checks, digests.pop() if len(digests) == 1 else "", values.decode)


async def compute(update: Update, slots: Sequence[Slot]) -> Computed:
    """Let targets compute probe and decode check with the served weights. In a staged update, after the swap."""
    options = update.record.request.options
    errors: dict[str, RlctlError] = {}
    if options.HasField("probe"):
        check = CheckWeightsRequest(action=CHECK_ACTION_PROBE, prompts=options.probe.prompts)
        errors |= verification_levels.judge_probe(await update.step(check, slots), options.probe)
        update.timeline.fail(errors, VERIFICATION_LEVEL_PROBE)
    elapsed_s = update.elapsed_s
    due = [slot for slot in slots if verification_levels.decode_check_due(options, slot, elapsed_s)]
    if not due:
        return Computed(errors, frozenset())
    check = CheckWeightsRequest(action=CHECK_ACTION_DECODE)
    limit_s = None
    if not options.decode_check:
        cost_s = max(seconds(slot.capabilities.decode_check_time) for slot in due)
        limit_s = max(LEAST_CHECK_S, PATIENCE * cost_s)
    results = await update.step(check, due, limit_s=limit_s)
    differing, passed = verification_levels.judge_decode(results, required=options.decode_check)
    update.timeline.fail(differing, VERIFICATION_LEVEL_DECODE)
    return Computed(errors | differing, passed)


async def _compared(
    update: Update, results: Sequence[StageResult], wrong: Mapping[str, RlctlError], expected: Expected
) -> dict[str, StageResult]:
    """Compare targets with a wrong digest tensor by tensor, with the source's fingerprints or those of a stage.

    The stage is the first right target, else a stage at the version, else the first wrong target.
    """
    differ = [
        result.slot
        for result in results
        if result.slot in wrong
        and wrong[result.slot].reason is Reason.DIGEST_MISMATCH
        and result.outcome == OUTCOME_APPLIED
    ]
    if not differ:
        return {}
    slots = {slot.name: slot for slot in update.targets if slot.name in differ}
    sound = {result.slot for result in results} - wrong.keys()
    fallback = update.reference or (update.done[0] if update.done else None)
    sound_slot = next((slot for slot in update.targets if slot.name in sound), fallback)
    reference = expected.fingerprints or await _fingerprints_of(update, sound_slot or slots[differ[0]], expected)
    if not reference:
        return {}
    compare = _check(update, expected, fingerprints=reference)
    return {result.slot: result for result in await update.step(compare, [*slots.values()])}


async def _fingerprints_of(update: Update, slot: Slot, expected: Expected) -> bytes:
    """Return the fingerprints of a target, empty if the target does not list its tensors."""
    (result,) = await update.step(_check(update, expected, per_tensor=True), [slot])
    digests = {tensor.name: tensor.sha256 for rank in result.rank_results for tensor in rank.check.model_tensors}
    return fingerprints(digests) if result.outcome == OUTCOME_APPLIED else b""


def _check(
    update: Update, expected: Expected, *, fingerprints: bytes = b"", per_tensor: bool = False
) -> CheckWeightsRequest:
    """Return the check of a target, with the digest function of the expected digest or of the update."""
    digest = expected.digest or expected.served
    key = key_of(digest) if digest else update.record.plan.digest_key
    return CheckWeightsRequest(
        shadow=update.staged,
        fingerprints=fingerprints,
        per_tensor=per_tensor,
        digest=DIGEST_FUNCTION_KEYED if key else DIGEST_FUNCTION_SHA256,
        digest_key=key,
    )
