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
"""Key of the single JSON line that a server prints on stdout once callers can reach the server."""
STOP_S = 10.0
"""Time for a server to end in order after SIGTERM. Launchers then kill its process."""
ENDS_S = 60.0
"""Time for a server to end in order after the end of its parent."""


def collect_seldom() -> None:
    """Let Python look for reference cycles after 10,000 new objects instead of 700.

    A message to hundreds of stages makes thousands of objects that live until its end, without cycles. The search took
    an eighth of a coordinator's processor time, a sixth of a stage server's (docs/benchmarks.md, fanout).
    """
    gc.set_threshold(10_000)


def announce(kind: str, **facts: str | int) -> None:
    """Print the bound addresses on stdout, for the parent process."""
    print(json.dumps({ANNOUNCEMENT: kind, **facts}), flush=True)  # noqa: T201 - the protocol with the launcher


def stop_event() -> asyncio.Event:
    """Return an event set by SIGTERM or SIGINT, on the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    return stop


def end(code: int) -> NoReturn:
    """End this process: run the functions of ``atexit``, without a shutdown of the interpreter.

    A daemon thread may return from torch during the interpreter's shutdown (a loading or stuck engine). Python then
    ends the thread at the interpreter's lock, inside C++ code that does not allow this: "terminate called without an
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
    """Return a command line for an external server that the kernel ends together with this process.

    The starting thread must outlive the server (prctl(2), PR_SET_PDEATHSIG). ``python``: the interpreter that sets the
    signal.
    """
    return [python, "-c", _DIES_WITH_PARENT, str(os.getpid()), *command]


def end_with_parent() -> None:
    """End this process when its standard input ends.

    A launcher keeps the other end of that pipe open, and the kernel closes the pipe at the launcher's death. A process
    that is still running ENDS_S later is stuck, and no parent remains to end it.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ENDS_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
