"""Groups that are left, or given up with their engine or their update, while they are being joined."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from torch.distributed import TCPStore
from weights_helpers import Background

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.group import rank_groups
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.group.rank_groups import Groups, Membership

PLACE = Membership(host="127.0.0.1", port=1, rank=1, world_size=2, backend="gloo")


class Joined:
    """A group that has just come to stand."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("end", [lambda groups: groups.leave("g"), lambda groups: groups.close()])
def test_a_group_that_is_left_in_the_moment_in_which_it_stands_is_closed(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[Groups], None]
) -> None:
    groups, group = Groups("127.0.0.1"), Joined()

    def join(*_: object, **__: object) -> Joined:
        end(groups)
        return group

    monkeypatch.setattr(rank_groups, "join", join)
    with pytest.raises(RlctlError) as caught:
        groups.join("g", PLACE, timeout_s=1, broadcast_timeout_s=1)
    assert caught.value.reason is Reason.GROUP_FAILED
    assert group.closed
    with pytest.raises(RlctlError, match="in no group 'g'"):
        groups.get("g")


@pytest.mark.parametrize(("verb", "reason"), [("join", Reason.GROUP_FAILED), ("probe", Reason.UNREACHABLE)])
def test_the_store_of_an_update_is_not_waited_for_when_it_has_gone(verb: str, reason: Reason) -> None:
    """By itself a member waits for a store that is late, until its time is up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Membership("127.0.0.1", listener.getsockname()[1], rank=1, world_size=2, backend="gloo")
    options = {"broadcast_timeout_s": 60} if verb == "join" else {}
    job = Background(lambda: getattr(Groups("127.0.0.1"), verb)("g", place, timeout_s=60, update_id="u", **options))
    with pytest.raises(RlctlError, match="Connection refused") as caught:
        job.result(20)
    assert caught.value.reason is reason


def test_a_group_whose_source_was_started_anew_at_the_same_address_is_joined_anew() -> None:
    """The members of other engines are there still, so not every connection of the group has ended."""
    engines = [Groups("127.0.0.1"), Groups("127.0.0.1")]
    places: list[Membership] = []

    def form(store: TCPStore) -> WeightGroup:
        places[:] = [Membership("127.0.0.1", store.port, rank, world_size=3, backend="gloo") for rank in (1, 2)]
        jobs = [
            Background(partial(groups.join, "g", place, timeout_s=60, broadcast_timeout_s=60))
            for groups, place in zip(engines, places, strict=True)
        ]
        source = join(("127.0.0.1", store.port), name="g", rank=0, world_size=3, timeout_s=60)
        for job in jobs:
            job.result(60)
        return source

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    source, first = form(store), engines[0].get("g")
    engines[0].join("g", places[0], timeout_s=60, broadcast_timeout_s=60)
    engines[0].probe("g", places[0], timeout_s=60)
    assert engines[0].get("g") is first, "it was confirmed"
    other = replace(places[0], port=places[0].port + 1)
    with pytest.raises(RlctlError) as caught:
        engines[0].join("g", other, timeout_s=60, broadcast_timeout_s=60)
    assert caught.value.reason is Reason.GROUP_EXISTS
    port = store.port
    source.close()
    del store  # the process of the source has ended
    source = form(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
    assert engines[0].get("g") is not first
    for groups in engines:
        groups.close()
    source.close()
