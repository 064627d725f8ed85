"""Checks of a verb or request against the capabilities that a stage registered."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message

from rlctl.contract import adapter_identity, digests, memory_regions
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet.slot import Slot
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
    return any(level in slot.capabilities.verification for level in _BY_DIGEST)


def computes_keyed_digests(slot: Slot) -> bool:
    """Whether a stage computes keyed digests, or no digests at all."""
    return digests.computes_keyed_digests(slot.capabilities)


def unsupported(slot: Slot, verb_name: str) -> RlctlError | None:
    if verb_name in slot.verbs:
        return None
    cause = slot.capabilities.unsupported.get(verb_name, "")
    engine = slot.record.registration.engine
    return Reason.UNSUPPORTED.error(cause or f"engine {engine!r} has no {verb_name}")


def incapable(slot: Slot, request: Message) -> RlctlError | None:
    """Return why a stage cannot carry out a request, regardless of its state, or None."""
    missing = unsupported(slot, of_request(request).name)
    if missing is None and isinstance(request, PauseGenerationRequest | ContinueGenerationRequest) and request.adapter:
        return unsupported(slot, "LoadAdapter")  # the stage serves no adapter
    if missing is None and isinstance(request, PauseGenerationRequest):
        missing = no_pause(slot, request.mode or PAUSE_MODE_ABORT, field="mode")
    if missing is None and isinstance(request, ReleaseMemoryRequest):
        missing = memory_regions.unkept(slot.capabilities, request)
    return missing


def incapable_all(slots: Sequence[Slot], request: Message) -> RlctlError | None:
    """Return why the first stage cannot carry out a request if no stage can, otherwise None."""
    first = None
    for slot in slots:
        missing = incapable(slot, request)
        if missing is None:
            return None
        first = first or missing
    return first


def no_pause(slot: Slot, mode: PauseMode.ValueType, *, field: str) -> RlctlError | None:
    """Return the error of a pause mode that a stage lacks, or None. A stage that publishes no modes decides itself."""
    modes = slot.capabilities.pause_modes
    if slot.pauses_in(mode):
        return None
    name, *mode_names = (PauseMode.Name(value).removeprefix("PAUSE_MODE_").lower() for value in (mode, *modes))
    return Reason.UNSUPPORTED.error(
        f"{slot.name} has no pause mode {name}; it has: {', '.join(mode_names)}", field=field
    )


def refuse_unpaused(slots: Sequence[Slot], request: PauseGenerationRequest) -> None:
    """Raise UNSUPPORTED, with the stage's name, if a stage serves adapters and cannot pause an adapter as requested."""
    for slot in slots:
        serves_none = "LoadAdapter" not in slot.verbs  # the stage serves no adapter
        unpaused = None if serves_none else adapter_identity.unpaused(slot.capabilities, request, slot.name)
        if unpaused is not None:
            unpaused.outcome = OUTCOME_REJECTED
            raise unpaused


def refuse_keyed_check(slots: Sequence[Slot], request: CheckWeightsRequest) -> None:
    """Raise UNSUPPORTED, with the stage's name, if a stage does not compute the keyed digest that a check requests."""
    for slot in slots:
        refusal = digests.keyed_digest_refusal(slot.capabilities, request, slot.name)
        if refusal is not None and not unsupported(slot, "CheckWeights"):
            refusal.outcome = OUTCOME_REJECTED
            raise refusal


def adapter_travels(slot: Slot, *transports: Transport.ValueType) -> bool:
    """Whether an adapter's tensors can reach or leave a stage by any of the transports."""
    by = slot.capabilities.adapter_transports
    return not by or not set(transports).isdisjoint(by)
