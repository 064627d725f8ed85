"""Exchange between the ranks of one server: each rank is called by itself, and has parts of tensors only.

The engine's own groups are not used: a message that one rank missed would be taken for another one later. A group of
the ranks' own is formed for each call, and ends by the call's deadline even if a rank fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.group.rank_groups import Groups, Membership
from rlctl.weights.shards.rank_exchange import Exchange, GroupExchange, LocalExchange
from rlctl.weights.shards.shard_map import agree_to_go_on
from rlctl.weights.tensor.work import Stop

Done = TypeVar("Done")

MEET_S = 30.0
"""How long a rank waits for the others to come: all are called at the same step of the engine."""


class Together:
    """This rank among those of its server.

    Attributes:
        store: where they meet; None: they do not know yet.
    """

    def __init__(self, groups: Groups, rank: int, size: int) -> None:
        """``groups``: where the groups of the ranks are kept, among the others."""
        self.store: tuple[str, int] | None = None
        self._groups = groups
        self._rank = rank
        self._size = size
        self._last = ""

    @contextmanager
    def exchanging(self, number: str, timeout_s: float) -> Iterator[Exchange]:
        """An exchange for one call, which has the same ``number`` at every rank. Raises GROUP_FAILED.

        It is left when the next one begins: by then all have read what was said in it. A rank that fails in the middle
        leaves it at once, which ends the waiting of the others.
        """
        if self._size == 1:
            yield LocalExchange()
            return
        if self.store is None:
            raise Reason.ILLEGAL_STATE.error("the stage server has not sent the address where the ranks meet")
        if self._last:
            self._groups.leave(self._last)
        self._last = ""
        name = f"rlctl-ranks-{number}"
        place = Membership(*self.store, self._rank, self._size, "gloo")
        self._groups.join(name, place, timeout_s=min(timeout_s, MEET_S), broadcast_timeout_s=timeout_s)
        self._last = name
        try:
            yield GroupExchange(self._groups.get(name).process_group)
        except RlctlError:
            raise  # all have agreed on it, or the group has failed
        except BaseException:
            self._last = ""
            self._groups.leave(name)
            raise


def agreed(exchange: Exchange, act: Callable[[], Done]) -> Done:
    """What every rank does for itself, without the others. What one of them raises, all raise."""
    stop = Stop()
    done: list[Done] = []
    try:
        done.append(act())
    except RlctlError as error:
        stop.set(error)
    agree_to_go_on(exchange, stop)
    return done[0]
