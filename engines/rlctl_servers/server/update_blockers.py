"""Settings with which a server keeps, copies or moves weights or KV entries where a load or a flush does not reach.

Each plug-in has a list of them, read from the source of the version that it was tested with. A server with one of them
serves the weights that it started with, and takes no others: the verbs that write are UNSUPPORTED, with the setting. So
are adapters beside a store of KV entries: vLLM's ExampleConnector, for one, looks entries up by token ids alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STORE = "keeps KV entries that a flush does not empty, and that do not say which weights computed them"
EMBEDDINGS = "keeps outputs of encoders that a flush does not empty, and that do not say which weights computed them"
EXPERTS = "moves or copies experts after the load, and an update writes them to the places of the load"
COPIES = "computes with copies of weights that an update does not write"
SHARED = "shares weights with processes that an update must not change"

_OFF = ("", "0", "0.0", "-1", "none", "null", "off", "false")


@dataclass(frozen=True)
class Keeper:
    """A setting.

    Attributes:
        name: the argument's name.
        why: what it does, after its name.
        on: values that do it; empty: all but those that turn a setting off.
        off: further values that turn it off.
    """

    name: str
    why: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    def set_to(self, value: object) -> bool:
        """Whether a setting of this value does it."""
        text = str(value if value is not None else "").lower()
        if self.on:
            return text in self.on
        return text not in (*_OFF, *self.off)

    @property
    def stores(self) -> bool:
        """Whether it stores KV entries. Entries of an adapter then outlive it, and may be taken for another's."""
        return self.why == STORE

    @property
    def reason(self) -> str:
        """Why a server with this setting takes no weights."""
        return f"{self.name} {self.why}"


def keepers_in(keepers: Iterable[Keeper], settings: Mapping[str, object]) -> list[Keeper]:
    """Those of the keepers that settings, by the names of arguments, turn on."""
    return [keeper for keeper in keepers if keeper.name in settings and keeper.set_to(settings[keeper.name])]
