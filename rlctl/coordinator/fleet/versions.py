"""Versions that a model's stages may serve: first version, publish, adoption."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.adapter_identity import same
from rlctl.contract.digests import computes_keyed_digests, key_of
from rlctl.coordinator.fleet.capabilities import can_digest
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import Verification, WeightVersion
from rlctl.v1.fleet_pb2 import PublishedVersion
from rlctl.v1.journal_pb2 import ModelRecord
from rlctl.v1.verbs_pb2 import Adapter

FIRST_LABEL = "initial"
FIRST_SEQUENCE = 1

HISTORY = 50
"""Versions before the latest version that the journal keeps."""

SOUND = (common_pb2.STAGE_STATE_READY, common_pb2.STAGE_STATE_PAUSED)
"""States of stages with the weights of their version, except under quarantine."""

POSSIBLY_DONE = (common_pb2.OUTCOME_APPLIED, common_pb2.OUTCOME_DIRTY, common_pb2.OUTCOME_UNKNOWN)
"""Outcomes after which an effect is assumed, where this is the safe assumption."""


def first_sequence(record: ModelRecord) -> int:
    """Return the sequence of a model's first version: 1, or above all sequences before the fleet was started over."""
    return record.first_sequence or FIRST_SEQUENCE


def first_version(model: ModelState, slot: Slot, now: Timestamp) -> ModelRecord | None:
    """Return the record that publishes a model's first version.

    None if the model has a version, or if the stage has no usable weights.

    The version is the checkpoint that the stage loaded. A stage that a coordinator with a different journal has updated
    keeps that version. Such a stage may still have that coordinator's groups, with lower numbers. ``now``: wall time.
    """
    if model.record.latest.sequence or slot.report is None or slot.report.state in _UNUSABLE:
        return None
    record = ModelRecord()
    record.CopyFrom(model.record)
    label = slot.record.registration.weight_version or FIRST_LABEL
    record.latest.CopyFrom(WeightVersion(label=label, sequence=first_sequence(record)))
    if slot.report.weight_version.sequence:
        record.latest.CopyFrom(slot.report.weight_version)
        record.group_generation = max(record.group_generation, now.ToMilliseconds())
    record.reserved_sequence = max(record.reserved_sequence, record.latest.sequence)
    record.publish_time.CopyFrom(now)
    record.model_digest = slot.report.model_digest
    record.checkpoint = slot.report.checkpoint
    return record


def adoptable(roster: Roster, slot: Slot) -> bool:
    """Whether the first weights of a stage are the latest version: the same digest or, without digests, the same
    checkpoint.

    A stage that has a version adopts only a changed label of that version. :func:`needs_keyed_digest` tells whether a
    digest by the version's key must be computed first.

    If only the model has a digest, a heal computes the digest of the stage. If the stage cannot compute digests, the
    checkpoint name decides for the first version only. The files of a later version may have been overwritten since the
    stage read them. If only the stage has a digest, see :func:`first_digest`.
    """
    model = roster.models[slot.model].record
    report = slot.report
    if report is None or not model.latest.sequence or report.state in _UNUSABLE:
        return False
    if report.weight_version.sequence:
        return _relabelled(model, report.weight_version)
    if proven_by_key(model, slot):
        return True
    if model.model_digest and report.model_digest:
        return model.model_digest == report.model_digest
    if report.model_digest or not model.checkpoint or model.checkpoint != report.checkpoint:
        return False
    unknown = model.latest.sequence == first_sequence(model) and not can_digest(slot)
    return unknown or not model.model_digest


def needs_keyed_digest(roster: Roster, slot: Slot) -> bool:
    """Whether only a digest by the latest version's key can show that a stage's first weights are this version.

    Engines digest their first weights by SHA-256, or not at all. False once the digest is computed, or could not be
    computed (``Slot.keyed_digests``).
    """
    key, report = key_of(roster.models[slot.model].record.model_digest), slot.report
    if not key or key in slot.keyed_digests or report is None or report.state in _UNUSABLE:
        return False
    return not report.weight_version.sequence and can_digest(slot) and slot.capabilities.keyed_digests


def computes_digest(slot: Slot, digest: str) -> bool:
    """Whether a stage computes a digest with the function of ``digest``, or computes no digests at all."""
    return not key_of(digest) or computes_keyed_digests(slot.capabilities)


def proven_by_key(model: ModelRecord, slot: Slot) -> bool:
    """Whether a stage's first weights have the keyed digest of the latest version."""
    key = key_of(model.model_digest)
    return bool(key) and slot.keyed_digests.get(key) == model.model_digest


def first_digest(roster: Roster, slot: Slot) -> ModelRecord | None:
    """Return the record of a first version with the digest of a stage with the same checkpoint name.

    None if the digest is known, or if a heal can now or later compare the weights with a peer.

    The record must be durable before the stage adopts the version. For later stages the checkpoint name is no proof:
    the files may have been overwritten.
    """
    model, report = roster.models[slot.model].record, slot.report
    if report is None or report.state in _UNUSABLE or report.weight_version.sequence or not report.model_digest:
        return None
    if model.latest.sequence != first_sequence(model) or model.model_digest or model.checkpoint != report.checkpoint:
        return None
    if not model.checkpoint or any(_may_tell(model, peer) for peer in roster.slots.values() if peer is not slot):
        return None
    record = ModelRecord()
    record.CopyFrom(model)
    record.model_digest = report.model_digest
    return record


def at_version(roster: Roster, slot: Slot) -> list[Slot]:
    """Return the other stages of a stage's model at the latest version that are sound and not quarantined."""
    latest = roster.models[slot.model].record.latest
    return [
        peer
        for peer in roster.slots.values()
        if peer.model == slot.model
        and peer is not slot
        and peer.state in SOUND
        and peer.report is not None
        and peer.report.weight_version == latest
        and peer.quarantine is None
    ]


def witnesses(roster: Roster, slot: Slot) -> list[Slot]:
    """Return the stages of :func:`at_version` that can digest weights."""
    return [peer for peer in at_version(roster, slot) if can_digest(peer)]


def _may_tell(model: ModelRecord, slot: Slot) -> bool:
    """Whether a stage can, or may later, digest the weights of a model's latest version."""
    if slot.model != model.name or slot.record.retired or not can_digest(slot):
        return False
    return slot.report is None or slot.report.weight_version == model.latest


def _relabelled(model: ModelRecord, reported: WeightVersion) -> bool:
    now = WeightVersion()
    now.CopyFrom(reported)
    now.label = model.latest.label
    return now == model.latest and reported.label != now.label and reported.label in model.former_labels


def publish(model: ModelState, record: ModelRecord, beside: Iterable[WeightVersion] = ()) -> None:
    """Admit a version whose record is durable, and of the earlier versions only ``beside``."""
    model.record = record
    model.admitted = [*beside, record.latest]


def close(model: ModelState) -> None:
    model.admitted = [model.record.latest]


def history(record: ModelRecord) -> list[PublishedVersion]:
    """Return the versions of a model, latest first."""
    if not record.latest.sequence:
        return []
    time = record.publish_time if record.HasField("publish_time") else None
    latest = PublishedVersion(
        version=record.latest, model_digest=record.model_digest, checkpoint=record.checkpoint, publish_time=time
    )
    return [latest, *reversed(record.history)]


def digest_key(record: ModelRecord) -> bytes:
    """Return the key of the published version's digests, or of the update if no digest is known. b"": SHA-256."""
    return key_of(record.model_digest) if record.model_digest else record.digest_key


def published(
    model: ModelState,
    version: WeightVersion,
    *,
    model_digest: str,
    checkpoint: str,
    verification: Verification,
    now: Timestamp,
    digest_key: bytes = b"",
) -> ModelRecord:
    """Return the record after a publish. The sequence never decreases."""
    record = ModelRecord()
    record.CopyFrom(model.record)
    assert version.sequence > record.latest.sequence, "a sequence is published once, in order"
    record.history.extend(history(record)[:1])
    del record.history[:-HISTORY]
    record.publish_time.CopyFrom(now)
    record.latest.CopyFrom(version)
    del record.former_labels[:]
    record.model_digest, record.digest_key = model_digest, digest_key
    record.checkpoint = checkpoint
    record.verification.CopyFrom(verification)
    return record


def verified(model: ModelState, evidence: Verification) -> ModelRecord:
    """Return the record with new evidence for the published version."""
    record = ModelRecord()
    record.CopyFrom(model.record)
    record.verification.CopyFrom(evidence)
    return record


def reserved(model: ModelState, trainer_incarnation: int) -> ModelRecord:
    """Return the record with the next sequence reserved for an update, so that no sequence is used twice.

    The first sequence stays free for the first version, possible while the update is open.
    """
    record = fenced(model, trainer_incarnation)
    record.reserved_sequence = max(record.reserved_sequence, record.latest.sequence, first_sequence(record)) + 1
    return record


def fenced(model: ModelState, trainer_incarnation: int) -> ModelRecord:
    """Return the record after an accepted update. Lower trainer incarnations are then fenced."""
    record = ModelRecord()
    record.CopyFrom(model.record)
    record.trainer_incarnation = trainer_incarnation
    return record


def with_adapter(model: ModelState, adapter: Adapter) -> ModelRecord:
    """Return the record with an adapter in place of an adapter of the same name."""
    record = without_adapter(model, adapter.name)
    record.adapters.append(adapter)
    record.adapters.sort(key=lambda other: other.name)
    return record


def without_adapter(model: ModelState, name: str) -> ModelRecord:
    record = ModelRecord()
    record.CopyFrom(model.record)
    del record.adapters[:]
    record.adapters.extend(adapter for adapter in model.record.adapters if adapter.name != name)
    return record


def lacking(roster: Roster, slot: Slot) -> list[Adapter]:
    """Return adapters of the model that a stage lacks, or has in a different load."""
    if slot.report is None:
        return []
    loaded = {adapter.name: adapter for adapter in slot.report.adapters}
    adapters = roster.models[slot.model].record.adapters
    return [each for each in adapters if each.name not in loaded or not same(loaded[each.name], each)]


def surplus(roster: Roster, slot: Slot) -> list[Adapter]:
    """Return a stage's adapters with a version that the model no longer has."""
    if slot.report is None:
        return []
    model_adapters = {adapter.name for adapter in roster.models[slot.model].record.adapters}
    return [adapter for adapter in slot.report.adapters if adapter.version and adapter.name not in model_adapters]


_UNUSABLE = (
    common_pb2.STAGE_STATE_UNSPECIFIED,
    common_pb2.STAGE_STATE_JOINING,
    common_pb2.STAGE_STATE_UPDATING,
    common_pb2.STAGE_STATE_DIRTY,
    common_pb2.STAGE_STATE_ASLEEP,
    common_pb2.STAGE_STATE_FAILED,
)
