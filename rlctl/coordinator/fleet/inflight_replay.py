"""Repeats of commands without a result over the next link, after a broken link.

Repeats keep the order and ids of the commands. The same process answers with the recorded result, or runs the
command now. The wait ends after the time in which a lost stage may still serve. Every update waits that long before it
publishes, so repeats delay no update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlctl.command_stream.commander import Commander, Issued
from rlctl.coordinator.fleet.slot import Slot


class Unanswered:
    """Commands without a result, by slot, in sending order."""

    def __init__(self, within_s: float) -> None:
        """``within_s``: longest wait for a stage's next link, in seconds. The command is UNKNOWN afterwards."""
        self._within_s = within_s
        self._kept: dict[Slot, list[Issued]] = {}

    def keep(self, slot: Slot, lost: Sequence[Issued]) -> None:
        """Keep the repeatable commands of a broken link. The other commands fail with LINK_LOST."""
        for issued in lost:
            if not issued.again:
                issued.fail()
                continue
            self._kept.setdefault(slot, []).append(issued)
            asyncio.get_running_loop().call_later(self._within_s, self._end, slot, issued)

    def ask(self, slot: Slot, commander: Commander) -> None:
        """Repeat the commands over a new link to the same incarnation."""
        for issued in self._kept.pop(slot, []):
            commander.ask_again(issued)

    def withdraw(self, slot: Slot, command_id: str) -> None:
        """Fail a cancelled command."""
        for issued in [issued for issued in self._kept.get(slot, []) if issued.command_id == command_id]:
            self._end(slot, issued)

    def end(self, slot: Slot) -> None:
        """Fail the commands of an incarnation that gets no further link."""
        for issued in self._kept.pop(slot, []):
            issued.fail()

    def _end(self, slot: Slot, issued: Issued) -> None:
        if issued in self._kept.get(slot, []):
            self._kept[slot].remove(issued)
            issued.fail()
