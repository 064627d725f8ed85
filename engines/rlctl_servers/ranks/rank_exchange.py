"""Exchange between the ranks of one server: each rank is called by itself, and has parts of tensors only.

The engine's own groups are not used: a rank that missed a message would take the next message for the missed message.
The ranks form a group of their own for each call. The group ends by the call's deadline even if a rank fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.group.rank_groups import Groups, Membership
from rlctl.weights.shards.rank_exchange import Exchange, GroupExchange, LocalExchange, agree_to_go_on
from rlctl.weights.tensor.work import Stop

Done = TypeVar("Done")

MEET_S = 30.0
"""Seconds that a rank waits for the other ranks. All ranks are called at the same step of the engine."""


class Together:
    """This rank among the ranks of its server.

    Attributes:
        store: address where the ranks meet; None: not known yet.
    """

    def __init__(self, groups: Groups, rank: int, size: int) -> None:
        """``groups``: keeps the groups of the ranks, beside all other groups."""
        self.store: tuple[str, int] | None = None
        self._groups = groups
        self._rank = rank
        self._size = size
        self._last = ""

    @contextmanager
    def exchanging(self, number: str, timeout_s: float) -> Iterator[Exchange]:
        """Yield an exchange for one call, with the same ``number`` at every rank. Raises GROUP_FAILED.

        The exchange is left when the next exchange begins: by then all ranks have read its messages. A rank leaves at
        once after a defect, or if the exchange has failed, and so ends the wait of the other ranks. A rank refuses
        inside the exchange, by :func:`agreed`: before it, the other ranks would wait for the refusing rank.
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
        exchange = GroupExchange(self._groups.get(name).process_group)
        try:
            yield exchange
        except BaseException as error:
            has_agreed = isinstance(error, RlctlError) and not exchange.failed
            if not has_agreed:
                self._last = ""
                self._groups.leave(name)
            raise


def agreed(exchange: Exchange, act: Callable[[], Done]) -> Done:
    """Run a step of this rank alone, and return its result. An error of any rank is raised at all ranks."""
    stop = Stop()
    done: list[Done] = []
    with stop.on_error():
        done.append(act())
    agree_to_go_on(exchange, stop)
    return done[0]
