"""What every part of the resolution goes by: flags, what holds for the fleet, the engines, and where problems go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.engine import KnownOptions
from rlctl.topology.flags import Flags
from rlctl.topology.problems import Problems
from rlctl.topology.schema import Section


@dataclass(frozen=True)
class Engines:
    """What is known of the engines here.

    Attributes:
        installed: names of the plug-ins.
        known_options: (plug-in, settings) → what it takes; None: not known.
    """

    installed: Sequence[str]
    known_options: Callable[[str, Mapping[str, str]], KnownOptions | None]


@dataclass(frozen=True)
class Context:
    """What one resolution goes by.

    Attributes:
        flags: of the command line.
        fleet: the file's section, or an empty one.
        engines: what is known of them.
        problems: where they go.
        per_node: GPUs of a node.
    """

    flags: Flags
    fleet: Section
    engines: Engines
    problems: Problems
    per_node: int

    def an_address(self, section: Section, key: str) -> None:
        """Have a problem with what is no HOST:PORT."""
        address = section.get(key, "")
        host, colon, port = address.rpartition(":")
        if address and not address.startswith("unix:") and not (host and colon and is_port(port)):
            self.complain(section, key, f"{address!r} is not HOST:PORT")

    def complain(self, section: Section, key: str, message: str, *, warning: bool = False) -> None:
        """Have a problem with a key."""
        line, path = section.at(key)
        self.problems.add(line, path, message, warning=warning)


def is_port(text: str) -> bool:
    """Whether it is a port's number."""
    return text.isascii() and text.isdigit() and 0 <= int(text[:6]) <= 65535
