"""Which adapters may be generated with, and what the server calls them. Pure."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import Adapter


@dataclass(frozen=True)
class Held:
    """An adapter that the server has loaded.

    Attributes:
        name: the server's, used for this load only.
        info: rlctl's name, its version and digest.
        tensors: how many it has.
        nbytes: their size in bytes.
    """

    name: str
    info: Adapter
    tensors: int
    nbytes: int


class LoraTable:
    """The adapters that serve. Changed by the admin verbs; may be read from any thread.

    SGLang takes a name for one adapter for ever: of another adapter under that name it says that it is loaded already,
    and a request for one that was unloaded makes it read the files again, whatever they hold by then. vLLM finds cached
    prefixes by the name. So every load gets a name of its own, and a switch to another version is a change of this
    table.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Held] = {}
        """By rlctl's name. Replaced, never changed."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()

    def new_name(self, info: Adapter) -> str:
        """A name for the server that was never used."""
        return f"{info.name}@{info.version}#{next(self._numbers)}"

    def put(self, held: Held) -> Held | None:
        """Let an adapter take the place of the one of its name, which is returned."""
        with self._lock:
            before = self.by_name.get(held.info.name)
            self.by_name = {**self.by_name, held.info.name: held}
            return before

    def drop(self, name: str) -> Held:
        """Take an adapter out, and return it. Raises ADAPTER_NOT_FOUND."""
        with self._lock:
            found = self.find(name, "name")
            self.by_name = {other: held for other, held in self.by_name.items() if other != name}
            return found

    def find(self, name: str, field: str) -> Held:
        """The adapter of this name. Raises ADAPTER_NOT_FOUND."""
        found = self.by_name.get(name)
        if found is None:
            there = ", ".join(sorted(self.by_name)) or "none"
            raise Reason.ADAPTER_NOT_FOUND.error(f"no adapter {name!r} is loaded; there are: {there}", field=field)
        return found

    @contextmanager
    def using(self, name: str) -> Iterator[Held | None]:
        """The adapter for one sample, which counts as in use until the end; None for the name "".

        Raises ADAPTER_NOT_FOUND.
        """
        if not name:
            yield None
            return
        with self._lock:
            held = self.find(name, "adapter")
            self._users[held.name] += 1
        try:
            yield held
        finally:
            with self._lock:
                self._users[held.name] -= 1

    def users(self, held_name: str) -> int:
        """Samples under way with the adapter that the server calls so."""
        with self._lock:
            return self._users[held_name]
