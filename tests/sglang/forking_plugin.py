"""A plug-in of SGLang's for tests: a server forks its schedulers and its detokenizer.

By default each of these processes starts with an interpreter, and imports what the server has imported already: fifteen
seconds of a core. The forked processes run the same functions with the same arguments.
"""

from __future__ import annotations

import os
from pathlib import Path


def register() -> None:
    """Make fork the start method of this server, in place of SGLang's spawn. Hooks of plug-ins are inherited."""
    import multiprocessing

    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force)
    os.register_at_fork(before=_alone)


def _alone() -> None:
    """Raise RuntimeError if this process has other threads. A forked process would lack them."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("the server has started a thread before its processes")


def environment(place: Path) -> dict[str, str]:
    """Make the plug-in known to servers; ``place``: a directory for it."""
    information = place / "forking-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: forking\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[sglang.srt.plugins]\nforking = forking_plugin:register\n")
    (place / "forking_plugin.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))}
