"""Checks whether a stage can do a verb or request, by the capabilities of its registration."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from rlctl.contract import adapter_identity, digests, memory_regions
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet.roster import Slot
from rlctl.v1.common_pb2 import (
    OUTCOME_REJECTED,
    PAUSE_MODE_ABORT,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_REPLICA,
    PauseMode,
    Transport,
)
from rlctl.v1.verbs_pb2 import (
    CheckWeightsRequest,
    ContinueGenerationRequest,
    PauseGenerationRequest,
    ReleaseMemoryRequest,
)

_BY_DIGEST = (VERIFICATION_LEVEL_EXPECTED, VERIFICATION_LEVEL_REPLICA)


def can_digest(slot: Slot) -> bool:
    """Whether a stage can digest the weights that its ranks hold."""
    return any(level in slot.capabilities.verification for level in _BY_DIGEST)


def computes_keyed_digests(slot: Slot) -> bool:
    """Whether a stage computes keyed digests, if it computes any."""
    return digests.computes_keyed_digests(slot.capabilities)


def unsupported(slot: Slot, verb_name: str) -> RlctlError | None:
    """Why a stage cannot do a verb at all, or None."""
    if verb_name in slot.verbs:
        return None
    why = slot.capabilities.unsupported.get(verb_name, "")
    engine = slot.record.registration.engine
    return Reason.UNSUPPORTED.error(why or f"engine {engine!r} has no {verb_name}")


def incapable(slot: Slot, request: Message) -> RlctlError | None:
    """Why a stage cannot carry a request out, whatever its state, or None."""
    missing = unsupported(slot, of_request(request).name)
    if missing is None and isinstance(request, PauseGenerationRequest | ContinueGenerationRequest) and request.adapter:
        return unsupported(slot, "LoadAdapter")  # it serves no adapter
    if missing is None and isinstance(request, PauseGenerationRequest):
        missing = no_pause(slot, request.mode or PAUSE_MODE_ABORT, field="mode")
    if missing is None and isinstance(request, ReleaseMemoryRequest):
        missing = memory_regions.unkept(slot.capabilities, request)
    return missing


def incapable_all(slots: Sequence[Slot], request: Message) -> RlctlError | None:
    """Why the first of these cannot carry a request out, if none of them can; None if one can."""
    first = None
    for slot in slots:
        missing = incapable(slot, request)
        if missing is None:
            return None
        first = first or missing
    return first


def no_pause(slot: Slot, mode: PauseMode.ValueType, *, field: str) -> RlctlError | None:
    """That a stage does not pause in this way, or None; one that publishes no modes is asked itself."""
    known = slot.capabilities.pause_modes
    if slot.pauses_in(mode):
        return None
    name, *there = (PauseMode.Name(each).removeprefix("PAUSE_MODE_").lower() for each in (mode, *known))
    return Reason.UNSUPPORTED.error(f"{slot.name} has no pause mode {name}; it has: {', '.join(there)}", field=field)


def refuse_unpaused(slots: Sequence[Slot], request: PauseGenerationRequest) -> None:
    """Raise UNSUPPORTED, with its name, for a stage that serves adapters and cannot pause one as a request says."""
    for slot in slots:
        able = "LoadAdapter" not in slot.verbs  # it serves no adapter
        unpaused = None if able else adapter_identity.unpaused(slot.capabilities, request, slot.name)
        if unpaused is not None:
            unpaused.outcome = OUTCOME_REJECTED
            raise unpaused


def refuse_keyed_check(slots: Sequence[Slot], request: CheckWeightsRequest) -> None:
    """Raise UNSUPPORTED, with its name, for a stage that does not compute the keyed digest that a check asks for."""
    for slot in slots:
        refusal = digests.keyed_digest_refusal(slot.capabilities, request, slot.name)
        if refusal is not None and not unsupported(slot, "CheckWeights"):
            refusal.outcome = OUTCOME_REJECTED
            raise refusal


def adapter_travels(slot: Slot, *transports: Transport.ValueType) -> bool:
    """Whether an adapter's tensors can reach a stage, or leave it, by one of these."""
    by = slot.capabilities.adapter_transports
    return not by or not set(transports).isdisjoint(by)
