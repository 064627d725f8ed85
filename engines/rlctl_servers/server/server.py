"""The server behind an engine: launched and watched, or attached to and watched."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rlctl.contract.errors import Reason, RlctlError
from rlctl_servers.options import address
from rlctl_servers.server.claim import Claim
from rlctl_servers.server.http import Answer, Http
from rlctl_servers.server.process import ServerProcess

log = logging.getLogger(__name__)

LOOK_S = 2.0
PROBE_S = 10.0
UNREACHABLE_LOOKS = 3
GONE_S = 1.0
SILENT_S = 90.0
"""Seconds after which a server that accepts connections without an answer is no longer busy but wedged."""


async def read_json(product: str, url: str, path: str, api_key: str) -> dict[str, Any]:
    """Return the JSON object of a server's answer to a GET, or {} for any other answer.

    Raises UNREACHABLE, and FIELD_INVALID for an invalid address or a refused key.
    """
    http = Http(product, address({"url": url}, ()), api_key)
    try:
        answer = await http.call(path, timeout_s=PROBE_S, admin=False)
    except TimeoutError:
        raise Reason.UNREACHABLE.error(f"the server at {url} does not answer", field="url") from None
    except RlctlError as error:
        raise Reason.UNREACHABLE.error(error.message, field="url") from None
    finally:
        await http.close()
    if answer.status in (401, 403):
        raise Reason.FIELD_INVALID.error(f"the server at {url} does not accept the key", field="options.api_key_file")
    return answer.body if answer.ok and isinstance(answer.body, dict) else {}


class Server(abc.ABC):
    """One server.

    Attributes:
        http: calls to the server.
        launched: the server is a child of this process.
        probe: path of a call that shows that the front answers, and neither generates nor waits.
    """

    probe: ClassVar[str]

    def __init__(self, process: ServerProcess | None, http: Http, on_end: Callable[[RlctlError], None]) -> None:
        """``process``: None for an attached server. ``on_end`` is called, from any thread, when the server is gone."""
        self.http = http
        self.launched = process is not None
        self._process = process
        self._on_end = on_end
        self._watch: asyncio.Task[None] | None = None
        self._claim: Claim | None = None

    @abc.abstractmethod
    async def refuse_unready(self) -> None:
        """Raise if a running server cannot be attached to."""

    def refuse_ill(self, answer: Answer) -> None:  # noqa: B027
        """Raise UNREACHABLE if the front answers the probe, but the server behind it is gone."""

    @property
    def pid(self) -> int:
        """Return the process id of a launched server, else 0."""
        return self._process.pid if self._process else 0

    def log_lines(self) -> list[str]:
        """Return the last log lines of a launched server."""
        return self._process.log_lines() if self._process else []

    async def start(self) -> None:
        """Launch the server, or claim a running server and check that it is reachable and generating.

        Raises OPERATION_CONFLICT for a server with another stage server.
        """
        if self._process is not None:
            await self._process.start(self._on_end)
        else:
            self._claim = Claim(self.http.product, self.http.url)
            try:
                await self.refuse_unready()
            except TimeoutError:
                self._claim.release()
                raise Reason.UNREACHABLE.error(
                    f"{self.http.product} at {self.http.url} does not answer", field="options.url"
                ) from None
            except BaseException as error:
                self._claim.release()
                if isinstance(error, RlctlError):
                    error.field = error.field or "options.url"
                raise
        self._watch = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """End a launched server, or disconnect from an attached server."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
        else:
            await self.http.close()
        if self._claim is not None:
            self._claim.release()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def is_gone(self) -> bool:
        """Return whether no process listens at the address of an attached server any more."""
        parts = urlsplit(self.http.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(GONE_S):
                addresses = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
                for *_, at in addresses:
                    with contextlib.suppress(ConnectionRefusedError):
                        _, writer = await asyncio.open_connection(*at[:2])
                        writer.close()
                        return False
        except OSError:  # also a timeout: the server may live
            return False
        return True

    async def _look(self) -> None:
        """Report that the server is gone, or that its front is silent."""
        now = asyncio.get_running_loop().time
        name = f"{self.http.product} at {self.http.url}"
        heard_at, unreachable, cause = now(), 0, ""
        while unreachable < UNREACHABLE_LOOKS and now() - heard_at < SILENT_S:
            await asyncio.sleep(LOOK_S)
            try:
                self.refuse_ill(await self.http.call(self.probe, timeout_s=PROBE_S))
                heard_at, unreachable, cause = now(), 0, ""
            except TimeoutError:
                log.warning("%s did not answer in %g s", name, PROBE_S)
            except RlctlError as error:
                unreachable += error.reason is Reason.UNREACHABLE
                cause = error.message
                log.warning("%s", error)
        reason = Reason.ENGINE_FAILED if unreachable else Reason.ENGINE_WEDGED
        self._on_end(reason.error(f"{cause or name + ' has not answered'}, for {now() - heard_at:.0f} s"))
        self.kill()
