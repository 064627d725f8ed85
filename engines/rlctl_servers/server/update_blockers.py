"""Settings that keep, copy or move weights or KV entries out of reach of a load or a flush.

Each plug-in has a list of such settings, read from the source of its tested version. A server with such a setting
serves only the weights of its start: the verbs that write are UNSUPPORTED, with the setting. Adapters are UNSUPPORTED
beside a store of KV entries: vLLM's ExampleConnector, for instance, looks entries up by token ids alone.
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
    """A setting that prevents updates.

    Attributes:
        name: the argument's name.
        why: effect of the setting, after its name.
        on: values with the effect; empty: all but the values that turn a setting off.
        off: further values that turn it off.
    """

    name: str
    why: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    def set_to(self, value: object) -> bool:
        """Return whether a setting of this value has the effect."""
        text = str(value if value is not None else "").lower()
        if self.on:
            return text in self.on
        return text not in (*_OFF, *self.off)

    @property
    def stores(self) -> bool:
        """Return whether the setting stores KV entries. Entries then outlive their adapter, and may match a different
        adapter.
        """
        return self.why == STORE

    @property
    def reason(self) -> str:
        return f"{self.name} {self.why}"


def keepers_in(keepers: Iterable[Keeper], settings: Mapping[str, object]) -> list[Keeper]:
    """Return the keepers that are turned on in settings by argument name."""
    return [keeper for keeper in keepers if keeper.name in settings and keeper.set_to(settings[keeper.name])]
