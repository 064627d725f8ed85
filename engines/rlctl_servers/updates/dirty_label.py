"""The label of a server that outlives its stage server, while its weights are of no version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlctl.engine import Call
from rlctl_servers.updates.version_labels import TRYING, WRITING


class Name(Protocol):
    """Gives the server a label. Raises as :meth:`rlctl_servers.server.admin_calls.Control.must`."""

    async def __call__(self, label: str, call: Call) -> None:
        """Give it."""


class Marking:
    """Whoever attaches to a server next goes by its label: half-written weights must not have that of whole ones."""

    def __init__(self, name: Name, label: Callable[[], str] | None) -> None:
        """``label``: the server's present one, where it outlives this process; None: it does not."""
        self._name = name
        self._label = label
        self._marked = False
        self._spoilt = False

    @property
    def spoilt(self) -> bool:
        """Whether weights are of no version, and no update is open that says so."""
        return self._spoilt

    async def mark(self, call: Call) -> bool:
        """Before the first byte; returns whether that had still to be said."""
        if self._label is None or self._marked:
            return False
        await self._name(WRITING, call)
        self._marked = True
        return True

    async def begin_trial(self, call: Call) -> None:
        """Before the load of a trial (:mod:`rlctl_servers.updates.reload_trial`). Until it has passed the weights are
        of no version, and the server's loads are not proven.
        """
        if self._label is not None:
            await self._name(TRYING, call)
            self._marked = True

    async def spoil(self, call: Call) -> None:
        """Before weights are spoilt by something else than an update."""
        await self.mark(call)
        self._spoilt = True

    async def aborted(self, call: Call, *, dirty: bool) -> None:
        """An update has ended without a version; ``dirty``: it may have written something, and nobody else's end of an
        update makes that whole.
        """
        self._spoilt |= dirty
        if self._marked and not self._spoilt and self._label is not None:
            await self._name(self._label(), call)
            self._marked = False

    def committed(self) -> None:
        """An update has given the server its version's label."""
        self._marked = self._spoilt = False
