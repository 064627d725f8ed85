"""Processes of benchmarks, which serve until they are stopped or their parent ends."""

from __future__ import annotations

import argparse

from aiohttp import web

from rlctl.runtime.server_process import announce, end_with_parent, stop_event


def arguments(**kinds: type) -> argparse.Namespace:
    """Return the options of this process, one of each name."""
    parser = argparse.ArgumentParser()
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--end-with-parent", action="store_true", required=True)
    options = parser.parse_args()
    del options.end_with_parent
    return options


async def serve(name: str, app: web.Application) -> None:
    """Announce a free port of the loopback, and serve there."""
    end_with_parent()
    stop = stop_event()
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    announce(name, address=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await stop.wait()
    await runner.cleanup()
