"""From a file and flags to a topology in one call: reads the file, and raises all errors together."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from rlctl.engine import installed_engines, known_options
from rlctl.topology import document
from rlctl.topology.context import Engines
from rlctl.topology.flags import Flags, document_of
from rlctl.topology.problems import COMMAND_LINE, Problems
from rlctl.topology.resolve import resolve
from rlctl.topology.resolved import Topology


@functools.cache
def engines_here() -> Engines:
    """Return the installed engine plug-ins."""
    return Engines(installed_engines(), known_options)


def load(path: Path | None, flags: Flags, engines: Engines | None = None) -> tuple[Topology | None, Problems]:
    """Return (topology, problems) of the file, or of the flags alone. Topology: None if the file is no document."""
    # A file name that is not UTF-8 cannot be printed.
    problems = Problems(os.fsencode(path).decode(errors="backslashreplace") if path is not None else COMMAND_LINE)
    root = document.read(path, problems) if path is not None else document_of(flags, problems)
    if root is None:
        return None, problems
    return resolve(root, flags, engines or engines_here(), problems, file=path is not None), problems


def loaded(path: Path | None, flags: Flags, engines: Engines | None = None) -> tuple[Topology, Problems]:
    """Load as :func:`load`, and raise all errors as one TOPOLOGY_INVALID. The returned problems are warnings."""
    topology, problems = load(path, flags, engines)
    problems.refuse()
    assert topology is not None
    return topology, problems
