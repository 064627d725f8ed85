"""A file and flags to a topology in one call: reads the file, refuses everything at once."""

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
    """What is installed here."""
    return Engines(installed_engines(), known_options)


def load(path: Path | None, flags: Flags, engines: Engines | None = None) -> tuple[Topology | None, Problems]:
    """(topology, problems): that of the file, or what the flags alone stand for. None: it is no document."""
    # A name that is not UTF-8 could not be printed.
    problems = Problems(os.fsencode(path).decode(errors="backslashreplace") if path is not None else COMMAND_LINE)
    root = document.read(path, problems) if path is not None else document_of(flags, problems)
    if root is None:
        return None, problems
    return resolve(root, flags, engines or engines_here(), problems, file=path is not None), problems


def loaded(path: Path | None, flags: Flags, engines: Engines | None = None) -> tuple[Topology, Problems]:
    """The same, and every error raised as one TOPOLOGY_INVALID; what is left in the problems are warnings."""
    topology, problems = load(path, flags, engines)
    problems.refuse()
    assert topology is not None
    return topology, problems
