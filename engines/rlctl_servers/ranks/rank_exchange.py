"""Exchange between the ranks of one server: each rank is called by itself, and has parts of tensors only.

The engine's own groups are not used: a rank that missed a message would take the next message for the missed message.
The ranks form a group of their own for each call. The group ends by the call's deadline even if a rank fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.group.rank_groups import Groups, Membership
from rlctl.weights.shards.rank_exchange import Exchange, GroupExchange, LocalExchange, agree_to_go_on
from rlctl.weights.tensor.work import Stop

Done = TypeVar("Done")

MEET_S = 30.0
"""Seconds that a rank waits for the other ranks. All ranks are called at the same step of the engine."""

_LEAST_S = 0.01


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
        until = time.monotonic() + timeout_s
        self._groups.join(name, place, timeout_s=min(timeout_s, MEET_S), broadcast_timeout_s=timeout_s)
        self._last = name
        exchange = _TimedExchange(self._groups.get(name).process_group, until)
        try:
            yield exchange
        except BaseException as error:
            has_agreed = isinstance(error, RlctlError) and not exchange.failed
            if not has_agreed:
                self._last = ""
                self._groups.leave(name)
            raise


class _TimedExchange(GroupExchange):
    """An exchange with the time of a call. By default a message has the time that the formation had left."""

    def __init__(self, group: Any, until: float) -> None:
        """``until``: end of the call, on :func:`time.monotonic`'s clock."""
        super().__init__(group)
        self._until = until

    def _wait(self, starts: Sequence[Callable[[], Any]]) -> None:
        self._group._set_default_timeout(self._remaining())
        super()._wait(starts)

    def _await(self, work: Any) -> None:
        work.wait(self._remaining())  # the group's default does not count for messages from one rank to another

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(self._until - time.monotonic(), _LEAST_S))


def agreed(exchange: Exchange, act: Callable[[], Done]) -> Done:
    """Run a step of this rank alone, and return its result. An error of any rank is raised at all ranks."""
    stop = Stop()
    done: list[Done] = []
    with stop.on_error():
        done.append(act())
    agree_to_go_on(exchange, stop)
    return done[0]
