"""The gate of a stage: permission to generate and to send. Requests read the gate, also from a different thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_JOINING,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
    STAGE_STATE_UPDATING,
    StageState,
    WeightVersion,
)

_OUT_OF_SERVICE = (STAGE_STATE_JOINING, STAGE_STATE_STALE, STAGE_STATE_DIRTY)


class Serving(NamedTuple):
    """The state of a stage as generation needs it; immutable, read from a different thread.

    Attributes:
        version: version of the weights.
        vouched: tokens of running requests may be sent, in any state.
        lease_until: end of the serving lease, on the clock's ``uptime``.
        obstacle: reason to serve nothing although the stage answers, or None.
        adapters: version by name of the servable adapters.
        loaded_adapters: names of the adapters at the ranks.
        awaited: names of the adapters that the fleet serves, here or elsewhere.
        spoiling: verb under way that removes what ranks need to generate, or "".
        closed_adapter: adapter that an update is about to replace and that takes no new request, or "".
        sealed: the engine generates nothing with ``closed_adapter`` until the update ends.
        paused_adapters: adapters paused by name, or about to be paused.
        withheld_adapters: adapters that may not be served until the stage has paused them.
    """

    slot: str
    model: str
    incarnation: int
    state: StageState.ValueType
    version: WeightVersion
    vouched: bool
    lease_until: float
    obstacle: RlctlError | None
    adapters: Mapping[str, str]
    loaded_adapters: frozenset[str]
    awaited: frozenset[str]
    spoiling: str
    closed_adapter: str = ""
    sealed: bool = False
    paused_adapters: frozenset[str] = frozenset()
    withheld_adapters: frozenset[str] = frozenset()

    def has_lease(self, clock: Clock) -> bool:
        return clock.uptime() < self.lease_until

    def refuse(self, clock: Clock, *, model: str = "", min_version_seq: int = 0, adapter: str = "") -> None:
        """Raise the reason for refusing a new request now."""
        self.refuse_model(model)
        if self.obstacle is not None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is quarantined: {self.obstacle.message}")
        if self.state != STAGE_STATE_READY:
            name = StageState.Name(self.state).removeprefix("STAGE_STATE_")
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is {name}", metadata={"state": name})
        if self.spoiling:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is carrying out {self.spoiling}")
        self._refuse_without_lease(clock)
        if min_version_seq > self.version.sequence:
            raise Reason.VERSION_TOO_OLD.error(
                f"{self.slot} is at version {self.version.sequence}; the request requires {min_version_seq}",
                field="min_version_seq",
            )
        if adapter and adapter == self.closed_adapter:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot}: an update is replacing adapter {adapter!r}")
        self.refuse_paused(adapter)
        if adapter and adapter not in self.adapters:
            self._refuse_adapter(adapter)

    def refuse_model(self, model: str) -> None:
        """Raise MODEL_NOT_FOUND for a different model. "" is any model."""
        if model and model != self.model:
            raise Reason.MODEL_NOT_FOUND.error(f"this stage serves {self.model!r}, not {model!r}", field="model")

    def refuse_paused(self, adapter: str) -> None:
        """Raise STAGE_NOT_SERVING for an adapter that is paused by name."""
        if adapter in self.paused_adapters:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot}: adapter {adapter!r} is paused by name")

    def _refuse_adapter(self, adapter: str) -> None:
        if adapter in self.withheld_adapters:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is about to pause adapter {adapter!r}")
        if adapter in self.loaded_adapters and adapter in self.awaited:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} holds adapter {adapter!r} at another version")
        adapter_names = ", ".join(sorted(self.adapters)) or "none"
        raise Reason.ADAPTER_NOT_FOUND.error(
            f"{self.slot} serves no adapter {adapter!r}; it serves: {adapter_names}", field="adapter"
        )

    def refuse_ongoing(self, clock: Clock, adapter: str = "") -> None:
        """Raise STAGE_NOT_SERVING if no further tokens of a running request may be sent.

        Tokens from before a pause may still be sent. Tokens of unverified weights, or of weights no longer admitted,
        may not.
        """
        if self.obstacle is not None:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is quarantined: {self.obstacle.message}")
        if self.state in _OUT_OF_SERVICE or not self.vouched:
            name = StageState.Name(self.state).removeprefix("STAGE_STATE_")
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} is {name}", metadata={"state": name})
        # Between the publication of a version and the commit here, the engine generates nothing with the adapter.
        replaced = self.sealed and adapter == self.closed_adapter and adapter in self.loaded_adapters
        if adapter and adapter not in self.adapters and not replaced and self.state != STAGE_STATE_UPDATING:
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} serves adapter {adapter!r} no more")
        self._refuse_without_lease(clock)

    def _refuse_without_lease(self, clock: Clock) -> None:
        if not self.has_lease(clock):
            raise Reason.STAGE_NOT_SERVING.error(f"{self.slot} holds no serving lease: no coordinator renews it")
