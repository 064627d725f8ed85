"""A hash ring: each key has an order of all slots. A new or removed slot changes each order only a little.

Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator

POINTS = 128
"""Points of each slot on the ring. The shares of the slots then differ by about a tenth."""


class Ring:
    """The slots on a ring, ordered for each key."""

    def __init__(self, slots: Iterable[str]) -> None:
        self.slots = frozenset(slots)
        points = sorted((_place(f"{slot}/{number}"), slot) for slot in self.slots for number in range(POINTS))
        self._places = [place for place, _ in points]
        self._owners = [slot for _, slot in points]

    def walk(self, key: str) -> Iterator[str]:
        """Yield every slot once, starting with the key's own."""
        start = bisect.bisect_left(self._places, _place(key))
        met: set[str] = set()
        for offset in range(len(self._owners)):
            slot = self._owners[(start + offset) % len(self._owners)]
            if slot not in met:
                met.add(slot)
                yield slot
            if len(met) == len(self.slots):
                return


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
