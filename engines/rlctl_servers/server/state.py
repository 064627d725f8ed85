"""State that all engine servers have. Pure: no I/O, no time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, PAUSE_MODE_UNSPECIFIED, MemoryTag, PauseMode
from rlctl.v1.verbs_pb2 import MemoryReport
from rlctl_servers.server.server_info import check_tags


@dataclass
class ServerState:
    """A server's state after the calls so far.

    Attributes:
        paused: mode in which generation is paused, or UNSPECIFIED.
        holding: paused by the plug-in itself, for an update or because memory is released.
        updating: an update is open, and needs the pause.
        released: regions that are released.
    """

    product: ClassVar[str]

    paused: PauseMode.ValueType = PAUSE_MODE_UNSPECIFIED
    holding: bool = False
    updating: bool = False
    released: set[MemoryTag.ValueType] = field(default_factory=set)

    @property
    def stopped(self) -> bool:
        """Return whether nothing new is generated. Active requests are frozen or held back."""
        return self.holding or self.paused != PAUSE_MODE_UNSPECIFIED

    def refuse_continue(self, *, updating: bool) -> None:
        """Raise MEMORY_RELEASED or ILLEGAL_STATE if generation must not continue, which would end some servers."""
        if self.released:
            names = (MemoryTag.Name(tag).removeprefix("MEMORY_TAG_").lower() for tag in sorted(self.released))
            raise Reason.MEMORY_RELEASED.error(f"released: {', '.join(names)}; generation needs every region")
        if updating:
            raise update_open()

    def release(
        self, tags: Sequence[MemoryTag.ValueType], supported: Collection[MemoryTag.ValueType]
    ) -> frozenset[MemoryTag.ValueType]:
        """Return the regions to release, without released regions. Empty ``tags`` stand for all known regions.

        Raises FIELD_INVALID for a region that the engine does not have.
        """
        check_tags(self.product, tags, supported)
        return frozenset(tags or supported) - self.released

    def resume(
        self, tags: Sequence[MemoryTag.ValueType], supported: Collection[MemoryTag.ValueType]
    ) -> frozenset[MemoryTag.ValueType]:
        """Return the released regions to resume: some servers end at any other region. Raises as :meth:`release`."""
        check_tags(self.product, tags, supported)
        return frozenset(tags or supported) & self.released

    def memory_report(self, *, keeps_weights: bool) -> MemoryReport:
        """Return the released regions. ``keeps_weights``: released weights keep their content."""
        released = sorted(self.released)
        return MemoryReport(
            released=released, kept=[tag for tag in released if keeps_weights and tag == MEMORY_TAG_WEIGHTS]
        )


def update_open() -> RlctlError:
    """Return the error of a verb that is refused during a weight update."""
    return Reason.ILLEGAL_STATE.error(
        "a weight update is open", next_step="Wait for its end, or `rlctl weights abort`."
    )
