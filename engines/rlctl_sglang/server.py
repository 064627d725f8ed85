"""The server behind an engine: launched and watched, or attached to and watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rlctl.engine import EngineConfig
from rlctl.errors import Reason, RlctlError
from rlctl_sglang.http import Http
from rlctl_sglang.options import Options
from rlctl_sglang.process import ServerProcess

log = logging.getLogger(__name__)

LOOK_S = 2.0
PROBE_S = 10.0
UNREACHABLE_LOOKS = 3
SILENT_S = 90.0
"""A server that takes connections and does not answer is busy, for a while."""


class Server:
    """One SGLang server.

    Attributes:
        http: how to talk to it.
        launched: it is a child of this process.
        fenced: nobody else can drive it.
    """

    def __init__(self, config: EngineConfig, options: Options, on_end: Callable[[RlctlError], None]) -> None:
        """``on_end`` is told, from any thread, when it is gone. Raises FIELD_INVALID."""
        self._on_end = on_end
        self._process = None if options.url else ServerProcess(config, options)
        self.launched = self._process is not None
        self.fenced = self.launched or bool(options.admin_key)
        self.http = self._process.http if self._process else Http(options.url, options.api_key, options.admin_key)
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of a launched one, else 0."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Launch it, or see that it is there and generating."""
        if self._process is not None:
            await self._process.start(self._on_end)
        else:
            await self._refuse_unready()
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

    async def _refuse_unready(self) -> None:
        try:
            answer = await self.http.call("/ready", timeout_s=PROBE_S)
            known = await self.http.call("/model_info", timeout_s=PROBE_S, admin=False)
        except TimeoutError:
            raise Reason.UNREACHABLE.error(f"SGLang at {self.http.url} does not answer", field="options.url") from None
        if answer.status != 200:
            raise Reason.ILLEGAL_STATE.error(
                f"SGLang at {self.http.url} is not ready: paused, or starting",
                field="options.url",
                next_step="Attach to a server that generates: what it was told before is not known here.",
            )
        if known.status != 200:
            raise Reason.FIELD_INVALID.error(
                f"SGLang at {self.http.url} does not take the key: {known.message}", field="options.api_key_file"
            )

    async def _look(self) -> None:
        """Notice a server that is gone, or whose front does not answer. Never by a generation: /ready makes none."""
        now = asyncio.get_running_loop().time
        heard, unreachable = now(), 0
        while unreachable < UNREACHABLE_LOOKS and now() - heard < SILENT_S:
            await asyncio.sleep(LOOK_S)
            try:
                await self.http.call("/ready", timeout_s=PROBE_S)
                heard, unreachable = now(), 0
            except TimeoutError:
                log.warning("SGLang at %s did not answer in %g s", self.http.url, PROBE_S)
            except RlctlError as error:
                unreachable += error.reason is Reason.UNREACHABLE
                log.warning("%s", error)
        reason = Reason.ENGINE_FAILED if unreachable else Reason.ENGINE_WEDGED
        self._on_end(reason.error(f"SGLang at {self.http.url} has not answered for {now() - heard:.0f} s"))
        self.kill()
