"""Requests of generation in flight at one server, counted by principal."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from rlctl.contract.access import Method
from rlctl.contract.errors import Reason
from rlctl.contract.quotas import counted, excess
from rlctl.contract.scopes import Identity, Scope, calling
from rlctl.transport.denials import Denials

MOST_REQUESTS = 65_536
"""Most requests in flight at a stage, of all principals: those that the engine computes, queues or holds at a pause."""

_GENERATION = Method("generation", (Scope.ROLLOUT,))


class Quotas:
    """The quotas of all principals at one server. On one event loop.

    Requests of principals without a quota are counted too, since a quota may be set while they run.
    """

    def __init__(
        self, denials: Denials, refused: Callable[[str], None] | None = None, *, most: int | None = None
    ) -> None:
        """``refused``: called with the principal of each refused request, for metrics; ``most``: requests of all
        principals together; None: any number.
        """
        self._denials = denials
        self._refused = refused
        self._most = most
        self._in_flight: Counter[str] = Counter()

    @contextlib.contextmanager
    def places(self, requests: int = 1) -> Iterator[None]:
        """Count requests of the running task's caller until the block ends: all or none.

        Raises QUOTA_EXCEEDED, and TOO_MANY_REQUESTS if the server is full.
        """
        identity = calling.get()
        name = ""
        if identity is not None:
            name = identity.principal.name
            self._refuse_excess(identity, requests)
        if self._most is not None and (total := self._in_flight.total()) + requests > self._most:
            raise Reason.TOO_MANY_REQUESTS.error(f"{total} requests are in flight at this server")
        with counted(self._in_flight, name, requests):
            yield

    def _refuse_excess(self, identity: Identity, requests: int) -> None:
        principal = identity.principal
        refusal = excess(principal, self._in_flight[principal.name], requests)
        if refusal is not None:
            self._denials.note(identity, _GENERATION, refusal, identity.host)
            if self._refused is not None:
                self._refused(principal.name)
            raise refusal

    @staticmethod
    def check_count(requests: int, field: str) -> None:
        """Raise FIELD_INVALID for a call with more requests than its caller's whole quota: no repeat can succeed."""
        identity = calling.get()
        limit = None if identity is None else identity.principal.max_in_flight
        if identity is not None and limit is not None and requests > limit:
            raise Reason.FIELD_INVALID.error(
                f"{requests} samples are more than {identity.principal.name} may have in flight, {limit}", field=field
            )
