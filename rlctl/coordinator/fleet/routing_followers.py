"""Routing followers: clients that keep a list of stages, such as a router. A stage leaves these lists before a
change.

A follower watches the fleet and confirms each change (``WatchFleetRequest.watch_id``, ``ConfirmFleet``). Before the
coordinator pauses or writes to a stage, it reports the stage as not routable. Then it waits until every follower has
confirmed this, for :data:`CONFIRM_S` at most. A slower follower is late. The coordinator does not wait for a late
follower again until that follower has confirmed the present state. So a router cannot block an operation. The gate of
the stage decides in any case which requests are served.
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
    """A watch that confirms changes.

    Attributes:
        owner: principal that watches.
        model: watched model; "": all.
        looked: revision of the fleet at the latest comparison.
        announced: revision of the latest event.
        confirmed: latest confirmed revision.
        late: the coordinator does not wait for the follower, which has confirmed nothing yet or took too long.
    """

    watch_id: str
    model: str
    owner: str
    looked: int = 0
    announced: int = 0
    confirmed: int = 0
    late: bool = True

    def has(self, revision: int) -> bool:
        """Whether the follower has confirmed every change up to a revision of the fleet."""
        return self.looked >= revision and self.confirmed >= self.announced


class Followers:
    """All followers of a coordinator. Followers are not journaled: followers watch a new coordinator again."""

    def __init__(self) -> None:
        self._by_id: dict[str, Follower] = {}
        self._news = asyncio.Event()

    @contextlib.contextmanager
    def following(self, watch_id: str, model: str) -> Iterator[Follower]:
        """Yield the follower of a watch while the watch lasts. Without a watch id the watch confirms nothing.

        Raises FIELD_INVALID for the watch id of a different principal.
        """
        follower = Follower(watch_id, model, current_caller().principal)
        if watch_id:
            _refuse_other(self._by_id.get(watch_id))
            self._by_id[watch_id] = follower  # replaces a former watch that may not have ended here yet
        try:
            yield follower
        finally:
            if self._by_id.get(watch_id) is follower:
                del self._by_id[watch_id]
                self._news.set()

    def looked(self, follower: Follower, revision: int, *, announced: bool) -> None:
        """Record a comparison of the fleet for a watch. ``announced``: an event was sent."""
        follower.looked = revision
        if announced:
            follower.announced = revision
        self._news.set()

    def confirm(self, watch_id: str, revision: int) -> None:
        """Record a follower's confirmation of a revision. Raises FIELD_INVALID for an unknown watch id or a later
        revision.
        """
        follower = self._by_id.get(watch_id)
        if follower is None:
            raise Reason.FIELD_INVALID.error(
                f"no WatchFleet with watch_id {watch_id!r} is open",
                field="watch_id",
                next_step="Call WatchFleet first.",
            )
        _refuse_other(follower)
        if revision > follower.announced:
            raise Reason.FIELD_INVALID.error(
                f"{watch_id} has received revision {follower.announced} at most", field="revision"
            )
        follower.confirmed = max(follower.confirmed, revision)
        follower.late = follower.late and not follower.has(follower.looked)
        self._news.set()

    def awaited(self, models: Collection[str]) -> list[Follower]:
        """Return the followers that the coordinator waits for when stages of the models change."""
        return [f for f in self._by_id.values() if not f.late and (not f.model or f.model in models)]

    async def taken_in(self, revision: int, models: Collection[str]) -> None:
        """Return once each awaited follower has confirmed a revision, has ended its watch, or is late."""
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
                log.warning(
                    "routing follower %s has not confirmed a change within %g s; changes no longer wait for it",
                    follower.watch_id,
                    CONFIRM_S,
                )


def _refuse_other(follower: Follower | None) -> None:
    if follower is not None and follower.owner != current_caller().principal:
        raise Reason.FIELD_INVALID.error(
            f"{follower.watch_id!r} is a watch of another principal",
            field="watch_id",
            next_step="Choose another name for the watch.",
        )
