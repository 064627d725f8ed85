"""The inputs of a resolution: flags, settings of the fleet, engines, and the collected problems."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlctl.engine import KnownOptions
from rlctl.topology.flags import STANDS_FOR, Flags
from rlctl.topology.problems import COMMAND_LINE, Problems
from rlctl.topology.schema import Section

LAST_PORT = 65535
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOST = re.compile(r"[^\s/@\[\]]+")


@dataclass(frozen=True)
class Engines:
    """The engine plug-ins of this machine.

    Attributes:
        installed: names of the plug-ins.
        known_options: (plug-in, settings) → options; None: not known.
    """

    installed: Sequence[str]
    known_options: Callable[[str, Mapping[str, str]], KnownOptions | None]


@dataclass(frozen=True)
class Context:
    """The inputs of a resolution.

    Attributes:
        fleet: the file's section, or an empty one.
        per_node: GPUs of a node.
    """

    flags: Flags
    fleet: Section
    engines: Engines
    problems: Problems
    per_node: int

    def an_address(self, section: Section, key: str, address: str, *, flag: str = "") -> None:
        """Report an address that is not HOST:PORT. ``flag``: source of the address, in place of the key."""
        if address and not is_address(address):
            brackets = "; a host of IPv6 stands in brackets" if address.count(":") > 1 else ""
            self.complain(section, key, f"{address!r} is not HOST:PORT{brackets}", flag=flag)

    def a_name(self, section: Section, key: str, name: str, *, flag: str = "") -> None:
        """Report a name that is invalid in a slot or a directory. ``flag``: source of the name, in place of the key."""
        if name and not _NAME.fullmatch(name):
            rule = "must be letters, digits, '.', '_' and '-', 63 at most"
            self.complain(section, key, f"{name!r} {rule}", flag=flag)

    def complain(self, section: Section, key: str, message: str, *, warning: bool = False, flag: str = "") -> None:
        """Report a problem with a key, or with the flag in place of the key."""
        line, path = section.at(key)
        if self.problems.source == COMMAND_LINE:
            flag = flag or STANDS_FOR.get(key, "")
        if flag:
            self.problems.add(0, flag, message, warning=warning, source=COMMAND_LINE)
        else:
            self.problems.add(line, path, message, warning=warning)


def is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT, [HOST]:PORT for IPv6."""
    host, _, port = text.rpartition(":")
    brackets = host.startswith("[") and host.endswith("]")
    valid_host = is_host(host[1:-1]) if brackets else ":" not in host and is_host(host)
    return valid_host and 0 <= whole(port) <= LAST_PORT


def is_host(text: str) -> bool:
    """Return whether the text is a host: a name, or an address without brackets."""
    if ":" not in text:
        return bool(_HOST.fullmatch(text))
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def whole(text: str) -> int:
    """Return the whole number in a text; -1 for any other text, and for 10 digits or more."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
