"""Failures that users of other systems had: where samples go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from rlctl.rollout.picking.hash_ring import Ring
from rlctl.rollout.picking.sessions import BOUND
from rlctl.sdk import aio

SLOTS = "abcd"
SESSIONS = 24
TURNS = 3
ROOM = math.ceil(BOUND * SESSIONS / len(SLOTS))
"""Sessions whose KV entries fit one engine: with more, each turn would drive out what another needs next."""


async def test_incident_22_consistent_hashing_gives_no_engine_more_sessions_than_fit_it(
    make_fleet: Callable[..., Any],
) -> None:
    # Ids of which a plain ring gives one engine more than it has room for: what happened there.
    ring = Ring(SLOTS)
    kept = ["".join(("talk ", str(number))) for number in range(1000)]
    crowded = [s for s in kept if next(ring.walk(s)) == "a"][: SESSIONS // 2]
    sessions = crowded + [s for s in kept if s not in crowded][: SESSIONS - len(crowded)]
    plain = Counter(next(ring.walk(session)) for session in sessions)
    assert max(plain.values()) > ROOM
    async with make_fleet(**dict.fromkeys(SLOTS, 1)) as fleet, await aio.connect(fleet.server.address) as client:
        rollout = client.rollout("actor", policy="consistent_hashing")
        homes: dict[str, set[str]] = {session: set() for session in sessions}
        for turn in range(TURNS):
            for session in sessions:
                (sample,) = await rollout.generate([turn], session_id=session, max_new_tokens=1)
                homes[session] |= {part.slot for part in sample.parts}
    assert all(len(slots) == 1 for slots in homes.values()), "and every turn finds the entries of the one before"
    assert max(Counter(slot for slots in homes.values() for slot in slots).values()) <= ROOM
