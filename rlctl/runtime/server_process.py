"""The life of a server process: logs to stderr, an announcement on stdout, an end on SIGTERM or with its parent."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

ANNOUNCEMENT = "rlctl"
"""Key of the one JSON line that a server prints on stdout when others can reach it."""
ENDS_S = 60.0
"""For a server to end in order once its parent is gone."""


def collect_seldom() -> None:
    """Have Python look for reference cycles after 10,000 new objects, not after 700.

    A message to hundreds of stages makes thousands that last for as long as it is under way, and none of them is in a
    cycle: looking was an eighth of a coordinator's processor time, a sixth of a stage server's (docs/benchmarks.md,
    fanout).
    """
    gc.set_threshold(10_000)


def announce(kind: str, **facts: str | int) -> None:
    """Say on stdout what was bound, for whoever started the process."""
    print(json.dumps({ANNOUNCEMENT: kind, **facts}), flush=True)  # noqa: T201 - the protocol with the launcher


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or SIGINT, on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    return stop


def end(code: int) -> NoReturn:
    """End this process: what is registered with ``atexit`` is done, the interpreter is not taken apart.

    A daemon thread that comes back from torch while it is (an engine that was still loading, one that is stuck) is
    ended where it waits for the interpreter's lock, inside C++ that does not allow that: "terminate called without an
    active exception", SIGABRT.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("its parent has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """A command line for somebody else's server: the kernel ends it with this process, however that ends.

    The thread that starts it must last as long as it is to run (prctl(2), PR_SET_PDEATHSIG). ``python``: interpreter
    that is asked to see to it.
    """
    return [python, "-c", _DIES_WITH_PARENT, str(os.getpid()), *command]


def end_with_parent() -> None:
    """End this process when its standard input ends.

    A launcher keeps the other end of that pipe open: when it dies, however it dies, the kernel closes it. What has not
    ended in order ENDS_S later is stuck, and nobody is left who would see that.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ENDS_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
