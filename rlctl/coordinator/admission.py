"""Which slots may be filled: of a fleet that a launcher has started, those of its topology and those that an operator
admits; of any other fleet, every slot.
"""

from __future__ import annotations

from collections.abc import Collection

from rlctl.errors import Reason
from rlctl.ports import Delete, Journal, Put


class Admission:
    """The slots that may be filled for the first time. A slot that is on record may be filled again."""

    def __init__(self, journal: Journal, topology: Collection[str] | None) -> None:
        """``topology``: the slots that may be filled; None: every slot."""
        self._journal = journal
        self.open = topology is None
        self._topology = frozenset(topology or ())
        self._admitted: set[str] = set()

    def load(self) -> None:
        """Take in what the journal holds."""
        self._admitted = {key for key, _ in self._journal.read("admitted")}

    @property
    def slots(self) -> list[str]:
        """Those that may be filled, where not every slot may be."""
        return sorted(self._topology | self._admitted)

    def refuse(self, slot: str) -> None:
        """Raise SLOT_NOT_ADMITTED, or return."""
        if not self.open and slot not in self._topology and slot not in self._admitted:
            raise Reason.SLOT_NOT_ADMITTED.error(
                f"slot {slot!r} is not in the fleet's topology",
                field="registration.slot",
                next_step=f"Add the engine to the topology, or run `rlctl admit {slot}`.",
            )

    async def change(self, admitted: Collection[str], dismissed: Collection[str]) -> None:
        """Admit slots, and others no more, durably. What fills a slot stays. Raises JOURNAL_FAILED."""
        puts = [Put("admitted", slot, b"") for slot in sorted(set(admitted) - self._admitted)]
        deletes = [Delete("admitted", slot) for slot in sorted(self._admitted.intersection(dismissed))]
        if puts or deletes:
            await self._journal.write([*puts, *deletes])
        self._admitted = (self._admitted | set(admitted)) - set(dismissed)
        self._topology -= set(dismissed)
