"""Identity and scale of adapters, the adapter of a request, and the engines that can pause an adapter's requests."""

from __future__ import annotations

import math

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_SKIPPED, PAUSE_MODE_ABORT, PauseMode
from rlctl.v1.fleet_pb2 import Capabilities
from rlctl.v1.verbs_pb2 import Adapter, AdapterConfig, LoadAdapterRequest, PauseGenerationRequest, UnloadAdapterRequest


def adapter_of(request: Message) -> str:
    """Return the adapter that a client's request names, or ""."""
    if isinstance(request, LoadAdapterRequest | UnloadAdapterRequest):
        return request.name
    return str(getattr(request, "adapter", ""))


def same(one: Adapter, other: Adapter) -> bool:
    """Return True if both are one adapter: equal name and label, and equal update ids if both have an id.

    A label may return with different weights. An adapter has no id if its load is older than the ids, or if a caller
    outside the fleet loaded it. Then only the label identifies the adapter.
    """
    if (one.name, one.version) != (other.name, other.version):
        return False
    return not one.load_id or not other.load_id or one.load_id == other.load_id


def scale_of(config: AdapterConfig) -> float:
    """Return the scale of an adapter's product. Rank and target modules of a config also show in the tensors."""
    return config.lora_alpha / (math.sqrt(config.lora_rank) if config.rslora else config.lora_rank)


def unpaused(capabilities: Capabilities, request: PauseGenerationRequest, who: str = "the engine") -> RlctlError | None:
    """Return the error of an engine, named ``who`` in messages, that cannot pause the adapter of a request, or None."""
    mode, modes = request.mode or PAUSE_MODE_ABORT, capabilities.adapter_pause_modes
    if not request.adapter or mode in modes:
        return None
    if not modes:
        return Reason.UNSUPPORTED.error(
            f"{who} cannot pause the requests of one adapter",
            field="adapter",
            next_step="Omit the adapter to pause all requests.",
            outcome=OUTCOME_SKIPPED,
        )
    supported = ", ".join(PauseMode.Name(each).removeprefix("PAUSE_MODE_").lower() for each in modes)
    name = PauseMode.Name(mode).removeprefix("PAUSE_MODE_").lower()
    return Reason.UNSUPPORTED.error(
        f"{who} has no pause mode {name} for the requests of one adapter; it has: {supported}",
        field="mode",
        outcome=OUTCOME_SKIPPED,
    )
