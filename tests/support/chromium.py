"""Headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "chromium"


class Page:
    """A page.

    Attributes:
        urls: addresses that the page requested.
        complaints: errors of scripts, violations of the content policy.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.urls: list[str] = []
        self.complaints: list[str] = []

    async def do(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            match message.get("method"):
                case "Network.requestWillBeSent":
                    self.urls.append(message["params"]["request"]["url"])
                case "Runtime.exceptionThrown" | "Log.entryAdded":
                    self.complaints.append(str(message["params"]))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        done = await self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def open(self, url: str, width: int, ready: str) -> None:
        """Load a page in a window of this width, and wait until ``ready`` holds."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.do("Emulation.setDeviceMetricsOverride", **metrics)
        await self.do("Page.navigate", url=url)
        complete = f"document.readyState === 'complete' && Boolean({ready})"
        async with asyncio.timeout(20):
            while not await self.value(complete):  # noqa: ASYNC110 - the page has no event for it
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Page]:
    """Open a page of a browser with a new profile. Skips the test without Chromium."""
    program = await asyncio.to_thread(subprocess.run, [TOOL, "path"], capture_output=True, text=True, check=False)
    if program.returncode:
        pytest.skip("Chromium is not installed here: tools/chromium install")
    options = ("--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={directory}")
    errors = (directory / "chromium.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        program.stdout.strip(), *options, "about:blank", stderr=errors, stdout=errors
    )
    port = directory / "DevToolsActivePort"
    try:
        async with asyncio.timeout(30) as start, aiohttp.ClientSession() as http:
            while not port.exists() or not port.read_text().strip():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
            address = f"http://127.0.0.1:{port.read_text().split()[0]}"
            async with http.put(f"{address}/json/new?about:blank") as answer:
                target = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
            async with http.ws_connect(target, max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    await page.do(f"{domain}.enable")
                start.reschedule(None)  # it bounds the start of the browser only
                yield page
    finally:
        process.terminate()
        await process.wait()
        errors.close()
