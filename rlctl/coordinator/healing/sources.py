"""The heal source of a stage: a checkpoint of the published version, or another stage."""

from __future__ import annotations

from rlctl.contract.adapter_identity import same
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.group_backends import BACKENDS
from rlctl.coordinator.fleet.capabilities import adapter_travels, unsupported
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import SOUND, at_version, computes_digest, lacking, witnesses
from rlctl.coordinator.healing.from_peer import alike
from rlctl.coordinator.transaction import verification_levels
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_WEIGHTS,
    STAGE_STATE_DIRTY,
    STAGE_STATE_FAILED,
    STAGE_STATE_STALE,
    TRANSPORT_DISK,
    TRANSPORT_TORCH_GLOO,
    VERIFICATION_LEVEL_NONE,
)
from rlctl.v1.verbs_pb2 import Adapter, UpdateOptions

_HEALABLE = (STAGE_STATE_STALE, STAGE_STATE_DIRTY)


def needs_heal(slot: Slot) -> bool:
    """Whether a stage is not at the published version, or has unproven weights."""
    return slot.state in _HEALABLE or (slot.record.HasField("quarantine") and slot.state in SOUND)


def unverifiable() -> RlctlError:
    """Return the refusal of a heal whose result could not be verified."""
    return Reason.UNHEALABLE.error("the version's digest is unknown, so a heal could not be verified", field="slots")


class Sources:
    """Finds the heal source of each stage, from the roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def of(self, slot: Slot, checkpoint: str) -> str | Slot:
        """Return the heal source of a stage: a checkpoint or another stage. Raises the cause if the stage cannot be
        healed.
        """
        model = self._roster.models[slot.model].record
        if slot.state == STAGE_STATE_FAILED and slot.quarantine is not None:
            raise from_detail(slot.quarantine)
        if slot.absent:
            raise Reason.ILLEGAL_STATE.error(
                f"{slot.name} is absent and cannot be healed: {slot.not_routable()}",
                field="slots",
                next_step="Start its engine again; it is then healed.",
            )
        if not needs_heal(slot):
            raise Reason.ILLEGAL_STATE.error(f"{slot.name} needs no heal", field="slots")
        if slot.report is not None and MEMORY_TAG_WEIGHTS in slot.report.released:
            raise Reason.MEMORY_RELEASED.error(f"{slot.name}: the weights are released", field="slots")
        if slot.report is not None and slot.report.HasField("quarantine"):
            # The stage would refuse every step, while healable stages wait.
            raise from_detail(slot.report.quarantine)
        if not model.latest.sequence:
            raise Reason.UNHEALABLE.error(f"no version of {model.name} is published", field="slots")
        source = checkpoint or (self._peer(slot) if slot.misread else None) or model.checkpoint or self._peer(slot)
        if not source:
            cause = "no other stage can send it"
            if not _receives(slot):
                cause = f"{slot.name} joins no group in which another stage could send it"
            raise Reason.UNHEALABLE.error(
                f"version {model.latest.label!r} of {model.name} is in no checkpoint, and {cause}", field="slots"
            )
        if not model.model_digest and not witnesses(self._roster, slot):
            raise unverifiable()
        if not computes_digest(slot, model.model_digest) and not witnesses(self._roster, slot):
            raise Reason.UNHEALABLE.error(
                f"{slot.name}'s engine does not compute the keyed digest of version {model.latest.label!r}, and no "
                "other stage can digest the version by SHA-256",
                field="slots",
                next_step="The next full update reaches the stage, unless it requires digest=keyed.",
            )
        transport = TRANSPORT_DISK if isinstance(source, str) else TRANSPORT_TORCH_GLOO
        obstacles = verification_levels.reached(slot, transport, UpdateOptions(), [slot])
        if all(obstacles.values()):
            cause = obstacles[VERIFICATION_LEVEL_NONE]
            raise Reason.UNHEALABLE.error(f"a heal of {slot.name} could not be verified: {cause}", field="slots")
        return source

    def lacks_adapters(self, slot: Slot) -> bool:
        """Whether a stage at the version lacks adapters that a source exists for."""
        return slot.state in SOUND and bool(self.obtainable(slot))

    def obtainable(self, slot: Slot) -> list[Adapter]:
        """Return missing adapters of a stage that lie on disk or that a peer can send."""
        return [a for a in lacking(self._roster, slot) if a.path or self.holder(slot, a) is not None]

    def holder(self, slot: Slot, adapter: Adapter) -> Slot | None:
        """Return a stage that serves the adapter and can send tensors."""
        if not adapter_travels(slot, *BACKENDS):
            return None
        return next((p for p in self._senders(slot) if _holds(p, adapter) and adapter_travels(p, *BACKENDS)), None)

    def _peer(self, slot: Slot) -> Slot | None:
        """Return a stage that is at the version and can send weights, preferably with the same parts at each rank."""
        senders = self._senders(slot) if _receives(slot) else []
        return next((peer for peer in senders if alike(peer, slot)), senders[0] if senders else None)

    def _senders(self, slot: Slot) -> list[Slot]:
        return [
            peer
            for peer in at_version(self._roster, slot)
            if not unsupported(peer, "SendWeights") and peer.record.registration.layout.store_host
        ]


def _receives(slot: Slot) -> bool:
    """Whether a stage can receive weights from a peer, over a gloo group."""
    joins = slot.capabilities.transports
    return unsupported(slot, "UpdateWeightsFromDistributed") is None and (not joins or TRANSPORT_TORCH_GLOO in joins)


def _holds(slot: Slot, adapter: Adapter) -> bool:
    report = slot.report
    return report is not None and any(same(loaded, adapter) for loaded in report.adapters)
