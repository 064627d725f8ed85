"""Label of a server that outlives its stage server, while its weights have no version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rlctl.engine import Call
from rlctl_servers.updates.version_labels import TRYING, WRITING


class Name(Protocol):
    """Gives the server a label. Raises as :meth:`rlctl_servers.server.admin_calls.Control.must`."""

    async def __call__(self, label: str, call: Call) -> None: ...


class Marking:
    """Marks half-written weights by the server's label: the next stage server that attaches trusts the label."""

    def __init__(self, name: Name, label: Callable[[], str] | None) -> None:
        """``label``: returns the present label of a server that outlives this process; None: the server does not."""
        self._name = name
        self._label = label
        self._marked = False
        self._spoilt = False

    @property
    def spoilt(self) -> bool:
        """Return whether the weights have no version and no open update explains this."""
        return self._spoilt

    async def mark(self, call: Call) -> bool:
        """Mark the server before the first byte. Return whether the mark was new."""
        if self._label is None or self._marked:
            return False
        await self._name(WRITING, call)
        self._marked = True
        return True

    async def begin_trial(self, call: Call) -> None:
        """Mark the server before the load of a trial (:mod:`rlctl_servers.updates.reload_trial`).

        Until the trial has passed, the weights have no version and the server's loads are unproven.
        """
        if self._label is not None:
            await self._name(TRYING, call)
            self._marked = True

    async def spoil(self, call: Call) -> None:
        """Mark the server before anything but an update spoils the weights."""
        await self.mark(call)
        self._spoilt = True

    async def aborted(self, call: Call, *, dirty: bool) -> None:
        """Record that an update has ended without a version. Restore the label of intact weights.

        ``dirty``: the update may have written weights. Only a commit repairs this, not the end of a later update.
        """
        self._spoilt |= dirty
        if self._marked and not self._spoilt and self._label is not None:
            await self._name(self._label(), call)
            self._marked = False

    def committed(self) -> None:
        """Record that an update has given the server its version's label."""
        self._marked = self._spoilt = False
