"""What placeholders hold on a cluster that is the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.spec import Reservation
from rlctl.launch.ray import placement_groups
from rlctl.launch.ray.node_choice import Node

ROOM = 4


class Group:
    """Bundles of a CPU each."""

    def __init__(self, bundles: Sequence[dict[str, float]], *, strategy: str, name: str) -> None:
        self.size, self.name = len(bundles), name
        HELD.append(self)

    def wait(self, _: float) -> bool:
        return sum(group.size for group in HELD) <= ROOM


HELD: list[Group] = []


def held() -> dict[str, int]:
    return {group.name: group.size for group in HELD}


def test_a_refused_change_gives_back_what_it_took_and_holds_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    HELD.clear()
    monkeypatch.setattr(placement_groups, "placement_group", Group)
    monkeypatch.setattr(placement_groups, "remove_placement_group", HELD.remove)
    monkeypatch.setattr(placement_groups.Places, "_nodes", lambda _: [Node("1", "a", {"CPU": float(ROOM)}, {})])
    places = placement_groups.Places(per_node=8)
    one, two = (Reservation(name, ranks, "cpu") for name, ranks in (("a", 1), ("b", 2)))
    places.make_room((), [one, two])
    assert held() == {"rlctl a": 1, "rlctl b": 2}
    with pytest.raises(RlctlError, match=r"c: 3 of these are to be kept free") as caught:
        places.make_room((), [two, Reservation("d", 1, "cpu"), Reservation("c", 3, "cpu")])
    assert caught.value.reason is Reason.PLACE_UNAVAILABLE
    assert held() == {"rlctl a": 1, "rlctl b": 2}
    places.make_room((), [one, Reservation("b", 3, "cpu")])
    assert held() == {"rlctl a": 1, "rlctl b": 3}, "a place grows into its own room"
    places.close()
    assert HELD == []
