"""Groups that are left, or given up with their engine or their update, while they are being joined."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from weights_helpers import Background

from rlctl.errors import Reason, RlctlError
from rlctl.weights import memberships
from rlctl.weights.memberships import Groups, Membership

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

    monkeypatch.setattr(memberships, "join", join)
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
