"""The server behind an engine: launched and watched, or attached to and watched."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl_servers.options import address
from rlctl_servers.server.http import Answer, Http
from rlctl_servers.server.process import ServerProcess

log = logging.getLogger(__name__)

LOOK_S = 2.0
PROBE_S = 10.0
UNREACHABLE_LOOKS = 3
SILENT_S = 90.0
"""A server that takes connections and does not answer is busy, for a while."""


async def told_at(product: str, url: str, path: str, api_key: str) -> dict[str, Any]:
    """The JSON object that a server answers a GET with; {} where what is there has no such answer.

    Raises UNREACHABLE, and FIELD_INVALID for no http address, or where it does not take the key.
    """
    http = Http(product, address({"url": url}, ()), api_key)
    try:
        answer = await http.call(path, timeout_s=PROBE_S, admin=False)
    except TimeoutError:
        raise Reason.UNREACHABLE.error(f"what is at {url} does not answer", field="url") from None
    except RlctlError as error:
        raise Reason.UNREACHABLE.error(error.message, field="url") from None
    finally:
        await http.close()
    if answer.status in (401, 403):
        raise Reason.FIELD_INVALID.error(f"what is at {url} does not take the key", field="options.api_key_file")
    return answer.body if answer.ok and isinstance(answer.body, dict) else {}


class Server(abc.ABC):
    """One server.

    Attributes:
        http: how to talk to it.
        launched: it is a child of this process.
        probe: path of a call that shows that its front answers, and neither generates nor waits.
    """

    probe: ClassVar[str]

    def __init__(self, process: ServerProcess | None, http: Http, on_end: Callable[[RlctlError], None]) -> None:
        """``process``: None for one that runs already. ``on_end`` is told, from any thread, when it is gone."""
        self.http = http
        self.launched = process is not None
        self._process = process
        self._on_end = on_end
        self._watch: asyncio.Task[None] | None = None

    @abc.abstractmethod
    async def refuse_unready(self) -> None:
        """Raise why a server that runs already cannot be attached to."""

    def refuse_ill(self, answer: Answer) -> None:  # noqa: B027
        """Raise UNREACHABLE where a front that answers the probe says that there is no server behind it any more."""

    @property
    def pid(self) -> int:
        """Process id of a launched one, else 0."""
        return self._process.pid if self._process else 0

    def log_lines(self) -> list[str]:
        """The last lines that a launched one has logged."""
        return self._process.log_lines() if self._process else []

    async def start(self) -> None:
        """Launch it, or see that it is there and generating."""
        if self._process is not None:
            await self._process.start(self._on_end)
        else:
            try:
                await self.refuse_unready()
            except TimeoutError:
                raise Reason.UNREACHABLE.error(
                    f"{self.http.product} at {self.http.url} does not answer", field="options.url"
                ) from None
            except RlctlError as error:
                error.field = error.field or "options.url"
                raise
        self._watch = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """End a launched one; let go of an attached one."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
        else:
            await self.http.close()

    def kill(self) -> None:
        """End a launched one at once."""
        if self._process is not None:
            self._process.kill()

    async def _look(self) -> None:
        """Notice a server that is gone, or whose front does not answer."""
        now = asyncio.get_running_loop().time
        name = f"{self.http.product} at {self.http.url}"
        heard, unreachable, why = now(), 0, ""
        while unreachable < UNREACHABLE_LOOKS and now() - heard < SILENT_S:
            await asyncio.sleep(LOOK_S)
            try:
                self.refuse_ill(await self.http.call(self.probe, timeout_s=PROBE_S))
                heard, unreachable, why = now(), 0, ""
            except TimeoutError:
                log.warning("%s did not answer in %g s", name, PROBE_S)
            except RlctlError as error:
                unreachable += error.reason is Reason.UNREACHABLE
                why = error.message
                log.warning("%s", error)
        reason = Reason.ENGINE_FAILED if unreachable else Reason.ENGINE_WEDGED
        self._on_end(reason.error(f"{why or name + ' has not answered'}, for {now() - heard:.0f} s"))
        self.kill()
