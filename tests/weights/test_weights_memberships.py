"""Groups that are left, or given up with their engine, while they are being joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
