"""The slots that a stage may fill.

The fleet of a launcher admits the slots of its topology and the slots that an operator admits. Any other fleet admits
every slot.
"""

from __future__ import annotations

from collections.abc import Collection

from rlctl.contract.errors import Reason
from rlctl.ports import Delete, Journal, Put


class AdmittedSlots:
    """The admitted slots. A slot that is on record needs no admission."""

    def __init__(self, journal: Journal, topology: Collection[str] | None) -> None:
        """``topology``: slots that are admitted from the start; None: every slot."""
        self._journal = journal
        self.open = topology is None
        self._topology = frozenset(topology or ())
        self._admitted: set[str] = set()

    def load(self) -> None:
        self._admitted = {key for key, _ in self._journal.read("admitted")}

    @property
    def slots(self) -> list[str]:
        """The admitted slots, unless every slot is admitted (:attr:`open`)."""
        return sorted(self._topology | self._admitted)

    def refuse(self, slot: str) -> None:
        if not self.open and slot not in self._topology and slot not in self._admitted:
            raise Reason.SLOT_NOT_ADMITTED.error(
                f"slot {slot!r} is not in the fleet's topology",
                field="registration.slot",
                next_step=f"Add the engine to the topology, or run `rlctl admit {slot}`.",
            )

    async def change(self, admitted: Collection[str], dismissed: Collection[str]) -> None:
        """Admit and dismiss slots, durably. Present stages stay. Raises JOURNAL_FAILED."""
        puts = [Put("admitted", slot, b"") for slot in sorted(set(admitted) - self._admitted)]
        deletes = [Delete("admitted", slot) for slot in sorted(self._admitted.intersection(dismissed))]
        if puts or deletes:
            await self._journal.write([*puts, *deletes])
        self._admitted = (self._admitted | set(admitted)) - set(dismissed)
        self._topology -= set(dismissed)
