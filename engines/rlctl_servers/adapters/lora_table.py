"""The serving adapters and their names at the server. Pure."""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import Adapter

_NAME = re.compile(r".*@.*#[0-9a-f]{8}-[1-9][0-9]*", re.DOTALL)


def is_from_rlctl(name: str) -> bool:
    """Return whether :meth:`LoraTable.new_name` of any stage server has made this name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Held:
    """An adapter that the server has loaded.

    Attributes:
        name: name at the server, used for this load only.
        info: rlctl's name, version and digest.
        tensors: number of tensors.
        nbytes: size of the tensors in bytes.
    """

    name: str
    info: Adapter
    tensors: int
    nbytes: int


class LoraTable:
    """The serving adapters. Admin verbs change the table; any thread may read the table.

    Every load gets a new name at the server, and a switch to a new version changes only this table. SGLang binds a name
    to its first adapter for ever. A second adapter under that name counts as loaded already. A request for an unloaded
    name reads the files again, with their present content. vLLM finds cached prefixes by the name.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Held] = {}
        """By rlctl's name. The mapping is replaced, never changed."""
        self._numbers = itertools.count(1)
        self._table_id = secrets.token_hex(4)  # an attached server may have the names of an earlier stage server
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()

    def new_name(self, info: Adapter) -> str:
        """Return a name that was never used at the server."""
        return f"{info.name}@{info.version}#{self._table_id}-{next(self._numbers)}"

    def put(self, held: Held) -> Held | None:
        """Replace the adapter of the same name. Return the replaced adapter, or None."""
        with self._lock:
            previous = self.by_name.get(held.info.name)
            self.by_name = {**self.by_name, held.info.name: held}
            return previous

    def drop(self, name: str) -> Held:
        """Remove an adapter and return it. Raises ADAPTER_NOT_FOUND."""
        with self._lock:
            removed = self.find(name, "name")
            self.by_name = {other: adapter for other, adapter in self.by_name.items() if other != name}
            return removed

    def find(self, name: str, field: str) -> Held:
        """Return the adapter of this name. Raises ADAPTER_NOT_FOUND."""
        adapter = self.by_name.get(name)
        if adapter is None:
            names = ", ".join(sorted(self.by_name)) or "none"
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {name!r} is loaded; there are: {names}", field=field)
        return adapter

    @contextmanager
    def using(self, name: str) -> Iterator[Held | None]:
        """Yield the adapter of a sample, in use until the end of the block; None for the name "".

        Raises ADAPTER_NOT_FOUND.
        """
        if not name:
            yield None
            return
        with self._lock:
            adapter = self.find(name, "adapter")
            self._users[adapter.name] += 1
        try:
            yield adapter
        finally:
            with self._lock:
                self._users[adapter.name] -= 1

    def users(self, held_name: str) -> int:
        """Return the number of running samples with the adapter of this name at the server."""
        with self._lock:
            return self._users[held_name]
