"""Telling a slime-style router that this worker is there: POST /add_worker?url=, until it has taken it.

The router of slime (``slime/router/router.py``) answers a repeated registration as it does the first one.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import quote

from rlctl_servers.http import Http

from rlctl.errors import RlctlError

log = logging.getLogger(__name__)

CALL_S = 5.0
FIRST_S = 0.5
LONGEST_S = 10.0


class Registration:
    """This worker at one router."""

    def __init__(self, router: str, url: str) -> None:
        """``url``: where the router reaches this worker."""
        self._http = Http("the router", router.rstrip("/"))
        self._query = f"?url={quote(url, safe='')}"
        self._url = url
        self.taken = asyncio.Event()

    async def keep_telling(self) -> None:
        """Register; what fails is tried again, at growing intervals."""
        wait = FIRST_S
        while not self.taken.is_set():
            why = await self._tell("/add_worker")
            if not why:
                self.taken.set()
                log.info("registered %s with %s", self._url, self._http.url)
                return
            log.warning("%s is not registered with %s yet: %s", self._url, self._http.url, why)
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_S)

    async def leave(self) -> None:
        """Take it back, at a router that can; others notice by its health."""
        if self.taken.is_set() and (why := await self._tell("/remove_worker")):
            log.info("%s keeps %s until it misses its health: %s", self._http.url, self._url, why)
        await self._http.close()

    async def _tell(self, path: str) -> str:
        """Why it was not taken, or ""."""
        try:
            answer = await self._http.call(path + self._query, {}, timeout_s=CALL_S)
        except TimeoutError:
            return "no answer"
        except RlctlError as error:
            return error.message
        return "" if answer.ok else f"{answer.status}: {answer.message}"
