"""Judges the evidence for an update: the weights at the targets, and the values computed there. Pure.

Evidence is of two kinds. A level of the bytes at the ranks (*held*) is chosen for each target. Probe and decode check
are evidence of the values that an engine computes (*computed*). Every target computes the probe, if there is any, at
every level of the bytes. A target makes the decode check if the update requests the check, or if the check is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlctl.contract.digests import comparable, key_of
from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    MEMORY_TAG_KV_CACHE,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    TRANSPORT_DISK,
    TRANSPORT_VLLM_NCCL,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_PROBE,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
    VERIFICATION_LEVEL_UNSPECIFIED,
    Transport,
    Verification,
    VerificationLevel,
)
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import CHECK_ACTION_DECODE, Probe, TensorDifference, UpdateOptions

Level: TypeAlias = VerificationLevel.ValueType

_BY_DIGEST = (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_REPLICA)

_OF_BYTES = (VERIFICATION_LEVEL_NONE, VERIFICATION_LEVEL_RECEIVED, *reversed(_BY_DIGEST))
"""Levels of the bytes at the ranks, weakest first."""

_DECODE_CHECK_SHARE = 0.1
"""Largest share of an update's time for a decode check that was not requested."""


@dataclass(frozen=True)
class Expected:
    """The sources' digests of the weights.

    Attributes:
        digest: model digest, hex; "" if unknown.
        sent: digest over the sent tensors only, hex; "" if unknown.
        fingerprints: of every tensor that ``digest`` covers, by sorted names; empty if unknown.
        served: digest of the stages that serve the version already, hex; "" without such stages.
    """

    digest: str = ""
    sent: str = ""
    fingerprints: bytes = b""
    served: str = ""


NOTHING = Expected()


def reached(
    slot: Slot,
    transport: Transport.ValueType,
    options: UpdateOptions,
    together: Sequence[Slot],
) -> dict[Level, str]:
    """Return the obstacle of each level of the bytes at a target, "" if the target reaches the level.

    ``together``: the stages that can be compared with each other, including this stage. EXPECTED counts as reached
    although the sources may turn out to have no digest.
    """
    obstacles: dict[Level, str] = dict.fromkeys(_OF_BYTES, "")
    for level in obstacles:
        if level not in (VERIFICATION_LEVEL_NONE, *slot.capabilities.verification):
            cause = slot.capabilities.unsupported.get(f"verify={_name(level)}")
            obstacles[level] = cause or "its engine has no code for it"
    if len(together) == 1:
        no_replica = "no other stage is updated together with it, so there is no replica to compare it with"
        obstacles[VERIFICATION_LEVEL_REPLICA] = no_replica
    if transport == TRANSPORT_DISK:
        obstacles[VERIFICATION_LEVEL_RECEIVED] = "it reads from disk and receives no tensors"
    # vLLM's own transfer has an answer of every rank.
    one_answer = slot.capabilities.answers_for_ranks and transport != TRANSPORT_VLLM_NCCL
    if one_answer and not options.HasField("probe"):
        obstacles[VERIFICATION_LEVEL_NONE] = "its engine gives one answer for all ranks, which proves no single rank"
    return obstacles


def of_bytes(options: UpdateOptions) -> Level:
    """Return the requested level of the bytes; UNSPECIFIED for AUTO."""
    return VERIFICATION_LEVEL_NONE if options.verify == VERIFICATION_LEVEL_PROBE else options.verify


def refuse_other_key(expected: Expected, key: bytes) -> None:
    """Raise FIELD_INVALID for source digests with a different key than the update's."""
    for field, digest in (("expected_digest", expected.digest), ("sent_digest", expected.sent)):
        if digest and key_of(digest) != key:
            raise Reason.FIELD_INVALID.error(
                f"{field} was made {_with(key_of(digest))}, digests of this update are made {_with(key)}", field=field
            )


def _with(key: bytes) -> str:
    return f"with key {key.hex()[:8]}" if key else "by SHA-256"


def refuse_uncomputable(options: UpdateOptions, slot: Slot) -> None:
    """Raise VERIFICATION_UNREACHABLE for a probe or a decode check that a target cannot compute."""
    capabilities, released = slot.capabilities, slot.report.released if slot.report is not None else ()
    for requested, able, resident, field, check in (
        (
            options.HasField("probe"),
            VERIFICATION_LEVEL_PROBE in capabilities.verification,
            MEMORY_TAG_KV_CACHE not in released,
            "probe",
            "the probe",
        ),
        (options.decode_check, checks_decode(slot), not released, "decode_check", "the decode check"),
    ):
        if not requested or (able and resident):
            continue
        cause = "its KV cache is released, so it can compute nothing" if able else "its engine has no code for it"
        raise Reason.VERIFICATION_UNREACHABLE.error(
            f"{slot.name} cannot compute {check}: {capabilities.unsupported.get(field) or cause}",
            field=f"options.{field}",
            next_step=f"Omit {check}, or update without this stage.",
        )


def checks_decode(slot: Slot) -> bool:
    """Whether a stage can compare decode with prefill."""
    return CHECK_ACTION_DECODE in slot.capabilities.check_actions


def decode_check_due(options: UpdateOptions, slot: Slot, elapsed_s: float) -> bool:
    """Whether a target makes the decode check, as ``UpdateOptions.decode_check`` says.

    If unset, the check must cost less than a tenth of the update's time, of which ``elapsed_s`` has passed.
    """
    if options.HasField("decode_check"):
        return options.decode_check
    if not checks_decode(slot) or (slot.report is not None and slot.report.released):
        return False
    cost_s = seconds(slot.capabilities.decode_check_time)
    return cost_s < _DECODE_CHECK_SHARE * (elapsed_s + cost_s)


def refuse_unreachable(
    options: UpdateOptions,
    targets: Sequence[Slot],
    transports: Mapping[str, Transport.ValueType],
    together: Sequence[Slot],
) -> None:
    """Raise VERIFICATION_UNREACHABLE if a target cannot reach the requested level, or any level with AUTO.

    Also raised if a target cannot compute the probe. The error names the target. FIELD_REQUIRED for level PROBE without
    a probe.

    Args:
        transports: the targets' transports, by slot.
        together: as for :func:`reached`.
    """
    level = of_bytes(options)
    if options.verify == VERIFICATION_LEVEL_PROBE and not options.HasField("probe"):
        raise Reason.FIELD_REQUIRED.error("verify=probe needs the probe to verify with", field="options.probe")
    for slot in targets:
        refuse_uncomputable(options, slot)
        obstacles = reached(slot, transports[slot.name], options, together)
        if level == VERIFICATION_LEVEL_UNSPECIFIED and not all(obstacles.values()):
            continue
        if level != VERIFICATION_LEVEL_UNSPECIFIED and not obstacles[level]:
            continue
        raise _unreachable(slot, level, obstacles)


def _unreachable(slot: Slot, requested: Level, obstacles: Mapping[Level, str]) -> RlctlError:
    names = ", ".join(_name(level) for level, obstacle in obstacles.items() if not obstacle) or "no level"
    if requested == VERIFICATION_LEVEL_UNSPECIFIED:
        message = f"{slot.name} reaches no level of verification; none: {obstacles[VERIFICATION_LEVEL_NONE]}"
    else:
        message = f"{slot.name} cannot verify at level {_name(requested)}: {obstacles[requested]}; it reaches: {names}"
    next_step = ""
    if slot.capabilities.answers_for_ranks and VERIFICATION_LEVEL_PROBE in slot.capabilities.verification:
        next_step = "Pass a probe: prompts with the log probabilities that the new weights give."
    return Reason.VERIFICATION_UNREACHABLE.error(message, field="options.verify", next_step=next_step)


def levels(
    options: UpdateOptions,
    targets: Sequence[Slot],
    transports: Mapping[str, Transport.ValueType],
    expected: Expected,
    together: Sequence[Slot],
    *,
    digesting: Collection[str],
    adapter: bool = False,
) -> dict[str, Level]:
    """Return the level of the bytes for each target, by slot. AUTO takes the highest level that the target reaches.

    Args:
        together: as for :func:`reached`.
        digesting: slots with ranks that digest the tensors on arrival.
        adapter: the update loads an adapter. An engine that answers for all ranks confirms after every rank has loaded
            it.

    Raises:
        FIELD_REQUIRED: the requested level needs a digest that the sources did not supply.
        VERIFICATION_UNREACHABLE: without the sources' digest a target reaches no level, or cannot compute the probe any
            more.
    """
    requested = of_bytes(options)
    source_digests = {VERIFICATION_LEVEL_EXPECTED: expected.digest, VERIFICATION_LEVEL_RECEIVED: expected.sent}
    missing = [level for level, digest in source_digests.items() if not digest]
    if requested in missing:
        raise Reason.FIELD_REQUIRED.error(
            f"verify={_name(requested)} needs the sources' digest", field="expected_digest"
        )
    chosen = {}
    for slot in targets:
        refuse_uncomputable(options, slot)
        obstacles = reached(slot, transports[slot.name], options, together)
        if adapter:
            obstacles[VERIFICATION_LEVEL_NONE] = ""
        if slot.name not in digesting:
            obstacles[VERIFICATION_LEVEL_RECEIVED] = "it did not digest the tensors that it received"
        possible = [level for level, obstacle in obstacles.items() if not obstacle and level not in missing]
        if requested == VERIFICATION_LEVEL_UNSPECIFIED and not possible:
            raise _unreachable(slot, requested, obstacles)
        chosen[slot.name] = requested or max(possible)
    return chosen


def digests_what_comes(
    options: UpdateOptions, slot: Slot, transport: Transport.ValueType, together: Sequence[Slot], *, partial: bool
) -> bool:
    """Whether a target must digest the tensors on arrival, because level RECEIVED may be chosen.

    For a ``partial`` update the sources know no model digest, so EXPECTED is out of reach.
    """
    if of_bytes(options) != VERIFICATION_LEVEL_UNSPECIFIED:
        return of_bytes(options) == VERIFICATION_LEVEL_RECEIVED
    obstacles = reached(slot, transport, options, together)
    if partial:
        del obstacles[VERIFICATION_LEVEL_EXPECTED]
    return max((level for level, why in obstacles.items() if not why), default=0) == VERIFICATION_LEVEL_RECEIVED


def judge_digests(
    results: Sequence[StageResult], levels: Mapping[str, Level], expected: Expected
) -> dict[str, RlctlError]:
    """Return the error of each target with a wrong digest, by slot.

    Every rank of a target must report the same model digest, without an inconsistent replica. At level EXPECTED the
    digest must be the source's. At level REPLICA all targets must agree, also with stages that serve the version
    already. If targets disagree, no target is known to be right. A single remaining target has no proof.
    """
    errors: dict[str, RlctlError] = {}
    digests: dict[str, str] = {}
    for result in results:
        try:
            digests[result.slot] = _digest(result)
        except RlctlError as error:
            errors[result.slot] = error
    compared = [slot for slot in digests if levels[slot] == VERIFICATION_LEVEL_REPLICA]
    if len(compared) == 1 and not expected.served:
        message = f"no other replica is left to compare {compared[0]} with"
        errors[compared[0]] = Reason.VERIFICATION_UNREACHABLE.error(
            message, field="options.verify", outcome=OUTCOME_DIRTY
        )
    replicas = {digests[slot] for slot in compared} | ({expected.served} if expected.served else set())
    for slot, digest in digests.items():
        if levels[slot] == VERIFICATION_LEVEL_EXPECTED and not comparable(digest, expected.digest):
            errors[slot] = Reason.VERIFICATION_UNREACHABLE.error(
                "its engine answered with another digest function than requested", outcome=OUTCOME_DIRTY
            )
        elif levels[slot] == VERIFICATION_LEVEL_EXPECTED and digest != expected.digest:
            errors[slot] = _mismatch(
                f"its weights have digest {digest[:16]}, the source sent {expected.digest[:16]}",
                digest=digest,
                expected=expected.digest,
            )
        elif levels[slot] == VERIFICATION_LEVEL_REPLICA and len(replicas) > 1 and digest != expected.served:
            errors[slot] = _mismatch(
                f"the replicas hold {len(replicas)} different sets of weights; this stage's digest is {digest[:16]}",
                digest=digest,
            )
    return errors


def judge_scales(results: Sequence[StageResult], expected: float | None) -> tuple[dict[str, RlctlError], float | None]:
    """Return the errors of the targets with a wrong scale of the adapter, by slot, and the right scale.

    The scale must be ``expected``. None: all targets must agree. If they disagree, no target is known to be right. A
    rank that reports no scale is not compared.
    """
    scales = {
        result.slot: {r.check.adapter_scale for r in result.rank_results if r.check.HasField("adapter_scale")}
        for result in results
    }
    reported = set().union(*scales.values())
    if expected is None and len(reported) == 1:
        (expected,) = reported
    errors = {}
    for slot, own in scales.items():
        if own - {expected}:
            found = ", ".join(f"{scale:g}" for scale in sorted(own))
            others = ", ".join(f"{scale:g}" for scale in sorted(reported - own)) or "one scale"
            errors[slot] = Reason.CHECKPOINT_MISMATCH.error(
                f"its adapter has scale {found}, not {others if expected is None else f'{expected:g}'}",
                next_step="Make the adapter's configuration equal on all hosts, and load the adapter again.",
            )
    return errors, expected


def judge_evidence(
    committed: Sequence[StageResult], levels: Mapping[str, Level], *, probed: bool
) -> dict[str, RlctlError]:
    """Return the error of each target at level NONE whose engine gave a single answer for all ranks, by slot.

    ``probed``: the probe is evidence for every target.
    """
    if probed:
        return {}
    return {
        result.slot: Reason.VERIFICATION_UNREACHABLE.error(
            "its engine gave one answer for all ranks, which proves no single rank, and nothing was verified",
            field="options.verify",
            outcome=OUTCOME_DIRTY,
        )
        for result in committed
        if levels.get(result.slot) == VERIFICATION_LEVEL_NONE and result.evidence == EVIDENCE_ENGINE
    }


def judge_received(committed: Sequence[StageResult], expected: Expected) -> dict[str, RlctlError]:
    """Return the error of each target at level RECEIVED, by slot, from the results of its commit or seal."""
    errors = {}
    for result in committed:
        for rank in result.rank_results:
            received = rank.weights.received_digest
            if received != expected.sent:
                errors[result.slot] = _mismatch(
                    f"rank {rank.coordinates.rank} took in {received[:16] or 'nothing that it digested'}, "
                    f"the source sent {expected.sent[:16]}",
                    digest=received,
                    expected=expected.sent,
                    ranks=str(rank.coordinates.rank),
                )
                break
    return errors


def judge_probe(results: Sequence[StageResult], probe: Probe) -> dict[str, RlctlError]:
    """Return the error of each target whose log probabilities differ from the probe's, by slot."""
    errors = {}
    for result in results:
        error = _probed(result, probe)
        if error is not None:
            errors[result.slot] = error
    return errors


def _probed(result: StageResult, probe: Probe) -> RlctlError | None:
    if result.outcome != OUTCOME_APPLIED:
        outcome = max(result.outcome, OUTCOME_DIRTY)
        return Reason.PROBE_MISMATCH.error(f"the probe could not be computed: {result.error.message}", outcome=outcome)
    answers = [rank.check.probed for rank in result.rank_results if rank.check.probed]
    if not answers or any(len(answer) != len(probe.prompts) for answer in answers):
        return Reason.PROBE_MISMATCH.error("the stage did not answer every prompt of the probe", outcome=OUTCOME_DIRTY)
    for answer in answers:
        for index, (prompt, reply) in enumerate(zip(probe.prompts, answer, strict=True)):
            if len(reply.logprobs) != len(prompt.logprobs):
                return Reason.PROBE_MISMATCH.error(
                    f"the stage computed {len(reply.logprobs)} log probabilities of prompt {index}, not "
                    f"{len(prompt.logprobs)}",
                    outcome=OUTCOME_DIRTY,
                )
            pairs = zip(prompt.logprobs, reply.logprobs, strict=True)
            gaps = [math.inf if math.isnan(computed) else abs(computed - stated) for stated, computed in pairs]
            worst = max(range(len(gaps)), key=gaps.__getitem__)
            if not gaps[worst] <= probe.tolerance:
                return Reason.PROBE_MISMATCH.error(
                    f"token {worst + 1} of prompt {index} has log probability {reply.logprobs[worst]:.6g}, the trainer "
                    f"expects {prompt.logprobs[worst]:.6g} within {probe.tolerance:g}",
                    metadata={"prompt": str(index), "token": str(worst + 1), "difference": f"{gaps[worst]:.6g}"},
                    outcome=OUTCOME_DIRTY,
                )
    return None


def judge_decode(results: Sequence[StageResult], *, required: bool) -> tuple[dict[str, RlctlError], frozenset[str]]:
    """Return the error of each target that failed the decode check, by slot, and the slots that passed.

    ``required``: the update requests the check, so a target without a result fails. Otherwise such a target
    (a busy server, for example) has neither failed nor passed.
    """
    errors, passed = {}, set()
    for result in results:
        if result.outcome == OUTCOME_APPLIED and any(rank.check.HasField("decode") for rank in result.rank_results):
            passed.add(result.slot)
            continue
        failure = from_detail(result.error)
        if failure.reason is not Reason.DECODE_MISMATCH:
            if not required and result.outcome != OUTCOME_DIRTY:
                continue
            cause = result.error.message or "the result has no message"
            failure = Reason.DECODE_MISMATCH.error(f"decode could not be compared with prefill: {cause}")
        failure.outcome = max(result.outcome, OUTCOME_DIRTY)
        errors[result.slot] = failure
    return errors, frozenset(passed)


def certificate(level: Level, *, probed: bool, decode: bool) -> Verification:
    """Return the evidence of a target: its level of the bytes, a probe, and a passed decode check."""
    computed = VERIFICATION_LEVEL_PROBE if probed else VERIFICATION_LEVEL_NONE
    return Verification(held=level, computed=computed, decode=decode)


def weakest(records: Sequence[Verification]) -> Verification:
    """Return the evidence of each kind that all records share; empty without records."""
    if not records:
        return Verification()
    return Verification(
        held=min(record.held for record in records),
        computed=min(record.computed for record in records),
        decode=all(record.decode for record in records),
    )


def named(error: RlctlError, result: StageResult) -> RlctlError:
    """Add the first differing tensor to a mismatch, and the ranks whose part differs or may differ.

    ``result``: the target's answer to a check with fingerprints. Without a difference in the answer the error stays
    unchanged.
    """
    reports = {rank.coordinates.rank: rank.check.difference for rank in result.rank_results}
    first = next((report for report in reports.values() if report.first), None)
    if result.outcome != OUTCOME_APPLIED or first is None:
        return error
    holders = {rank: report.part for rank, report in reports.items() if report.part.name == first.first}
    differing = [rank for rank, part in holders.items() if part.differs]
    if not differing and len(holders) == 1:
        differing = list(holders)
    error.message += f"; {_first_of(first)}"
    error.metadata |= {"tensor": first.first, "differing": str(first.count)}
    if differing:
        error.message += f", at {_ranks(differing)}"
        error.metadata["ranks"] = ",".join(map(str, differing))
    else:
        error.message += f", of which {_ranks(list(holders))} hold a part each"
        error.metadata["holders"] = ",".join(map(str, holders))
    return error


def _first_of(difference: TensorDifference) -> str:
    if difference.count == 1:
        return f"of {difference.tensors} tensors only {difference.first} differs"
    return f"{difference.count} of {difference.tensors} tensors differ, first {difference.first}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _digest(result: StageResult) -> str:
    if result.outcome != OUTCOME_APPLIED:
        outcome = result.outcome if result.outcome == common_pb2.OUTCOME_UNKNOWN else OUTCOME_DIRTY
        raise Reason.DIGEST_MISMATCH.error(
            f"its weights could not be digested: {result.error.message}", outcome=outcome
        )
    digests = {rank.check.model_digest for rank in result.rank_results}
    inconsistent = sorted({name for rank in result.rank_results for name in rank.check.inconsistent})
    if inconsistent:
        raise _mismatch(
            f"replicas of {inconsistent[0]} differ between its ranks ({len(inconsistent)} tensors do)",
            tensors=",".join(inconsistent),
        )
    if len(digests) != 1 or not next(iter(digests)):
        raise _mismatch("its ranks do not name one model digest")
    return digests.pop()


def _mismatch(message: str, **metadata: str) -> RlctlError:
    return Reason.DIGEST_MISMATCH.error(message, metadata=metadata, outcome=OUTCOME_DIRTY)


def _name(level: Level) -> str:
    return VerificationLevel.Name(level).removeprefix("VERIFICATION_LEVEL_").lower()
