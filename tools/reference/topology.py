"""docs/reference/topology.md and topology.schema.json: every key of a topology file."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rlctl.topology.json_schema import schema as json_schema
from rlctl.topology.schema import FILE, FLEET, GROUP, MODEL, MOST, Key
from tools.reference.markdown import prose, table

_INTRODUCTION = f"""\
The keys of the file of `rlctl up`, `plan` and `validate` ([topology.md](../topology.md)). `topology.schema.json` beside
this page is a JSON Schema of the file. Some editors check YAML against it, with
`# yaml-language-server: $schema=PATH/topology.schema.json` on the first line. Whole numbers are {MOST} at most.
"""


def page() -> Iterator[str]:
    """Yield every section."""
    yield "# Keys of a topology file\n"
    yield from prose(_INTRODUCTION)
    yield from _section("The file", FILE)
    yield from _section("fleet", FLEET)
    for key in FLEET:
        if key.of:
            yield from _section(f"fleet.{key.name}", key.of)
    yield from _section("A model", MODEL)
    yield from _section("A server group", GROUP)
    for key in GROUP:
        if key.of:
            yield from _section(f"An item of {key.name}", key.of)


def schema() -> Iterator[str]:
    """Yield the JSON Schema."""
    yield json.dumps(json_schema(), indent=2)


def _section(title: str, keys: tuple[Key, ...]) -> Iterator[str]:
    yield f"## {title}\n"
    rows = [
        [
            f"`{key.name}`" + (f" (or `{key.alias}`)" if key.alias else ""),
            key.expected,
            "required" if key.required else key.default,
            key.meaning,
        ]
        for key in keys
    ]
    yield from table(["key", "value", "default", "meaning"], rows)
