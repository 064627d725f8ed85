"""Routing followers: clients that keep a list of stages, such as a router. A stage leaves their lists before it
changes.

A follower watches the fleet and confirms each change (``WatchFleetRequest.watch_id``, ``ConfirmFleet``). Before the
coordinator pauses a stage, or lets it be written to, it reports the stage as not routable. Then it waits until every
follower has confirmed this, for :data:`CONFIRM_S` at most. A follower that takes longer is late. The coordinator does
not wait for a late follower again until it has confirmed the present state. So a router cannot block an operation. The
gate of the stage decides in any case what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.contract.scopes import current_caller

log = logging.getLogger(__name__)

CONFIRM_S = 1.0


@dataclass(eq=False)
class Follower:
    """One watch that confirms.

    Attributes:
        watch_id: its name.
        owner: principal that watches.
        model: whose stages it is told of; "": all.
        looked: revision of the fleet at the last look for news.
        told: revision of the last news.
        confirmed: revision that it has said to have taken in.
        late: it is not waited for: it has confirmed nothing yet, or took too long.
    """

    watch_id: str
    model: str
    owner: str
    looked: int = 0
    told: int = 0
    confirmed: int = 0
    late: bool = True

    def has(self, revision: int) -> bool:
        """Whether it has taken in everything up to a revision of the fleet."""
        return self.looked >= revision and self.confirmed >= self.told


class Followers:
    """All of one coordinator's. They are nobody's state: a new coordinator learns of them as they watch again."""

    def __init__(self) -> None:
        self._by_id: dict[str, Follower] = {}
        self._news = asyncio.Event()

    @contextlib.contextmanager
    def following(self, watch_id: str, model: str) -> Iterator[Follower]:
        """A watch, for as long as it lasts. Without a name it confirms nothing. Raises FIELD_INVALID for the name of
        another principal's watch.
        """
        follower = Follower(watch_id, model, current_caller().principal)
        if watch_id:
            _refuse_other(self._by_id.get(watch_id))
            self._by_id[watch_id] = follower  # in the place of its former watch, which may not have broken here yet
        try:
            yield follower
        finally:
            if self._by_id.get(watch_id) is follower:
                del self._by_id[watch_id]
                self._news.set()

    def looked(self, follower: Follower, revision: int, *, told: bool) -> None:
        """The fleet was looked at for a watch, and it was ``told`` what was new, or there was nothing."""
        follower.looked = revision
        if told:
            follower.told = revision
        self._news.set()

    def confirm(self, watch_id: str, revision: int) -> None:
        """A follower has taken in what it was told. Raises FIELD_INVALID where nobody watches under this name."""
        follower = self._by_id.get(watch_id)
        if follower is None:
            raise Reason.FIELD_INVALID.error(
                f"nobody watches the fleet as {watch_id!r}", field="watch_id", next_step="WatchFleet with it first."
            )
        _refuse_other(follower)
        if revision > follower.told:
            raise Reason.FIELD_INVALID.error(
                f"{watch_id} was told of revision {follower.told} at most", field="revision"
            )
        follower.confirmed = max(follower.confirmed, revision)
        follower.late = follower.late and not follower.has(follower.looked)
        self._news.set()

    def awaited(self, models: Collection[str]) -> list[Follower]:
        """Those that are waited for when stages of these models change."""
        return [f for f in self._by_id.values() if not f.late and (not f.model or f.model in models)]

    async def taken_in(self, revision: int, models: Collection[str]) -> None:
        """Return once nobody is left to wait for: each has taken a revision in, has gone, or is late."""
        followers = self.awaited(models)

        def missing() -> list[Follower]:
            return [f for f in followers if self._by_id.get(f.watch_id) is f and not f.has(revision)]

        try:
            async with asyncio.timeout(CONFIRM_S):
                while missing():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            for follower in missing():
                follower.late = True
                log.warning("%s has not confirmed in %g s what it was told: it is late", follower.watch_id, CONFIRM_S)


def _refuse_other(follower: Follower | None) -> None:
    if follower is not None and follower.owner != current_caller().principal:
        raise Reason.FIELD_INVALID.error(
            f"{follower.watch_id!r} is a watch of another principal",
            field="watch_id",
            next_step="Choose another name for the watch.",
        )
