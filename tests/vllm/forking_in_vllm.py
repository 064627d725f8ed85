"""A plug-in of vLLM's for tests: a server forks its engine and its workers.

fork is vLLM's default on GPUs. On a CPU vLLM starts each of these processes with an interpreter, which imports what the
server has imported already: twelve seconds of a core.
"""

from __future__ import annotations

import multiprocessing


def register() -> None:
    """Make fork the start method of this server. Changes of other plug-ins are inherited."""
    choose = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: choose("fork" if method == "spawn" else method)  # type: ignore[assignment]
