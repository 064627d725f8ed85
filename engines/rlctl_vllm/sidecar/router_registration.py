"""Registration of this worker at a router, repeated until the router has accepted.

slime's own router (``slime/router/router.py``) has POST /add_worker?url=, and answers a repeated registration like the
first. sglang-router, which slime runs too, has POST /workers, and DELETE /workers/ID for an id out of GET /workers.
sglang-router lists a worker once the worker answers /health.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from urllib.parse import quote

from rlctl_servers.options import check_url
from rlctl_servers.server.http import Answer, Http

from rlctl.contract.errors import Reason, RlctlError

log = logging.getLogger(__name__)

CALL_S = 5.0
FIRST_S = 0.5
LONGEST_S = 10.0
_NO_SUCH_CALL = (404, 405)


class Registration:
    """Registration of this worker at a router."""

    def __init__(self, router: str, url: str) -> None:
        """``url`` is the address at which the router reaches this worker. Raises FIELD_INVALID for no address."""
        check_url(router, "router")
        self._http = Http("the router", router.rstrip("/"))
        self._query = f"?url={quote(url, safe='')}"
        self._url = url
        self.registered = asyncio.Event()
        self._by_workers = False

    async def keep_telling(self) -> None:
        """Register; a failure is followed by a retry, at growing intervals."""
        wait = FIRST_S
        while not self.registered.is_set():
            failure = await _told(self._join())
            if not failure:
                self.registered.set()
                log.info("registered %s with %s", self._url, self._http.url)
                return
            log.warning("%s is not registered with %s yet: %s", self._url, self._http.url, failure)
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_S)

    async def leave(self) -> None:
        """Remove the registration if the router can. Other routers notice by the health of the worker."""
        if self.registered.is_set() and (failure := await _told(self._leave())):
            log.info("%s keeps %s until it misses its health: %s", self._http.url, self._url, failure)
        await self._http.close()

    async def _join(self) -> None:
        """Add the worker. Raises RlctlError, TimeoutError if the router does not accept."""
        answer = await self._http.call(f"/add_worker{self._query}", {}, timeout_s=CALL_S)
        if answer.status in _NO_SUCH_CALL:
            self._by_workers = True
            answer = await self._http.call("/workers", {"url": self._url}, timeout_s=CALL_S)
        _check(answer)

    async def _leave(self) -> None:
        """Remove the worker. Raises RlctlError, TimeoutError if the router keeps the worker."""
        if not self._by_workers:
            _check(await self._http.call(f"/remove_worker{self._query}", {}, timeout_s=CALL_S))
            return
        listed = _check(await self._http.call("/workers", timeout_s=CALL_S))
        for worker in listed.body["workers"]:
            if worker["url"] == self._url:
                _check(await self._http.call(f"/workers/{worker['id']}", timeout_s=CALL_S, method="DELETE"))


async def _told(call: Awaitable[None]) -> str:
    """Wait for a call. Return the reason of its failure, or ""."""
    try:
        await call
    except TimeoutError:
        return "no answer"
    except RlctlError as error:
        return error.message
    return ""


def _check(answer: Answer) -> Answer:
    """Return the answer of a success. Raises ENGINE_FAILED with the message of any other answer."""
    if answer.status // 100 != 2:
        raise Reason.ENGINE_FAILED.error(f"{answer.status}: {answer.message}")
    return answer
