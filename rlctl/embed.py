"""A coordinator inside the trainer's own process: no daemon to run, the same SDK in front of it."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rlctl.client import aio
from rlctl.client.fleet import Fleet
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.loops import LoopThread
from rlctl.transport.auth import load_token


def embedded(
    stages: Sequence[str] = (),
    *,
    journal: str | Path | None = None,
    listen: str = "127.0.0.1:0",
    token: str | None = None,
    insecure: bool = False,
    heal_by_hand: Collection[str] = (),
) -> EmbeddedFleet:
    """Start a coordinator on threads of this process and take charge of stage servers.

    Args:
        stages: addresses (``host:port``) of stage servers that run without a coordinator (``rlctl stage``).
        journal: file of the journal; a temporary one if None, which ends with this process.
        listen: where the coordinator can be reached besides, by ``rlctl`` for instance; also by stage servers that
            register by themselves.
        token: bearer token, else RLCTL_TOKEN_FILE, else RLCTL_TOKEN, else none.
        insecure: bind where others can reach it though there is no token.
        heal_by_hand: models whose late joiners and restarted engines wait for :meth:`Fleet.heal`; others are brought to
            the published version without being asked.

    Raises UNREACHABLE for a stage that does not answer, JOURNAL_FAILED, INSECURE_BIND.
    """
    token = token if token is not None else load_token()
    temporary = tempfile.TemporaryDirectory(prefix="rlctl-") if journal is None else None
    path = Path(temporary.name) / "journal.db" if temporary else Path(str(journal))
    config = CoordinatorConfig(path, listen, token, insecure, heal_by_hand=heal_by_hand)
    server_loop = LoopThread("rlctl coordinator")
    try:
        server = server_loop.call(_start(config, stages))
    except BaseException:
        server_loop.stop()
        raise
    client_loop = LoopThread("rlctl client")
    client = client_loop.call(aio.connect(server.address, token=token))
    return EmbeddedFleet(client, client_loop, server, server_loop, temporary)


async def _start(config: CoordinatorConfig, stages: Sequence[str]) -> CoordinatorServer:
    server = CoordinatorServer(config)
    await server.start()
    try:
        for address in stages:
            await server.coordinator.adopt(address)
    except BaseException:
        await server.stop()
        raise
    return server


class EmbeddedFleet(Fleet):
    """A :class:`rlctl.client.fleet.Fleet` whose coordinator lives here. Closing it stops the coordinator.

    Attributes:
        address: where the coordinator can be reached by others.
    """

    def __init__(
        self,
        client: aio.AsyncFleet,
        client_loop: LoopThread,
        server: CoordinatorServer,
        server_loop: LoopThread,
        temporary: tempfile.TemporaryDirectory[str] | None,
    ) -> None:
        super().__init__(client, client_loop)
        self.address = server.address
        self._server = server
        self._server_loop = server_loop
        self._temporary = temporary

    def __enter__(self) -> Self:
        """Use it as a context manager to stop it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.close()

    def close(self) -> None:
        """Close the client, stop the coordinator; stages serve until their lease has run out."""
        super().close()
        if self._server_loop.running:
            self._server_loop.call(self._server.stop())
            self._server_loop.stop()
        if self._temporary is not None:
            self._temporary.cleanup()
