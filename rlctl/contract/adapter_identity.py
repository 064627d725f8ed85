"""When two adapters are the same one, which adapter a request names, and which engines can pause its requests."""

from __future__ import annotations

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_SKIPPED, PAUSE_MODE_ABORT, PauseMode
from rlctl.v1.fleet_pb2 import Capabilities
from rlctl.v1.verbs_pb2 import Adapter, LoadAdapterRequest, PauseGenerationRequest, UnloadAdapterRequest


def adapter_of(request: Message) -> str:
    """The adapter that a request of a client names; "": none."""
    if isinstance(request, LoadAdapterRequest | UnloadAdapterRequest):
        return request.name
    return str(getattr(request, "adapter", ""))


def same(one: Adapter, other: Adapter) -> bool:
    """Whether they are one adapter: by name and label, and by the update that brought it where both say which.

    A label may come again with other weights. One without an id was there before ids were kept, or its engine was
    told to load it by somebody else; its label is all there is.
    """
    if (one.name, one.version) != (other.name, other.version):
        return False
    return not one.load_id or not other.load_id or one.load_id == other.load_id


def unpaused(capabilities: Capabilities, request: PauseGenerationRequest, who: str = "the engine") -> RlctlError | None:
    """Why an engine, which messages call ``who``, cannot pause the adapter of a request in its mode, or None."""
    mode, modes = request.mode or PAUSE_MODE_ABORT, capabilities.adapter_pause_modes
    if not request.adapter or mode in modes:
        return None
    if not modes:
        return Reason.UNSUPPORTED.error(
            f"{who} cannot pause the requests of one adapter",
            field="adapter",
            next_step="Pause all requests: leave the adapter out.",
            outcome=OUTCOME_SKIPPED,
        )
    there = ", ".join(PauseMode.Name(each).removeprefix("PAUSE_MODE_").lower() for each in modes)
    name = PauseMode.Name(mode).removeprefix("PAUSE_MODE_").lower()
    return Reason.UNSUPPORTED.error(
        f"{who} has no pause mode {name} for the requests of one adapter; it has: {there}",
        field="mode",
        outcome=OUTCOME_SKIPPED,
    )
