"""Commands whose link broke before their result: repeated over the next link.

They are sent in their order and under their ids. If the process is the same, the stage answers with the recorded
result, or runs the command now. The wait ends after the time in which a lost stage may still serve. Every update waits
that long before it publishes, so the repeats delay no update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlctl.command_stream.commander import Commander, Issued
from rlctl.coordinator.fleet.roster import Slot


class Unanswered:
    """By stage, in the order in which they were sent."""

    def __init__(self, within_s: float) -> None:
        """``within_s``: how long a stage's next link is waited for before what became of a command is UNKNOWN."""
        self._within_s = within_s
        self._kept: dict[Slot, list[Issued]] = {}

    def keep(self, slot: Slot, lost: Sequence[Issued]) -> None:
        """A link has ended without an answer to these. Those that are not to be asked again fail with LINK_LOST."""
        for issued in lost:
            if not issued.again:
                issued.fail()
                continue
            self._kept.setdefault(slot, []).append(issued)
            asyncio.get_running_loop().call_later(self._within_s, self._end, slot, issued)

    def ask(self, slot: Slot, commander: Commander) -> None:
        """A link to the same incarnation stands."""
        for issued in self._kept.pop(slot, []):
            commander.ask_again(issued)

    def withdraw(self, slot: Slot, command_id: str) -> None:
        """Nobody wants it carried out any more."""
        for issued in [issued for issued in self._kept.get(slot, []) if issued.command_id == command_id]:
            self._end(slot, issued)

    def end(self, slot: Slot) -> None:
        """There will be no further link to this incarnation."""
        for issued in self._kept.pop(slot, []):
            issued.fail()

    def _end(self, slot: Slot, issued: Issued) -> None:
        if issued in self._kept.get(slot, []):
            self._kept[slot].remove(issued)
            issued.fail()
