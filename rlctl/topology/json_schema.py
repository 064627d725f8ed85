"""The table of keys as JSON Schema (draft 2020-12), for editors."""

from __future__ import annotations

from typing import Any

from rlctl.topology.schema import FILE, MOST, Key

_TYPES: dict[str, dict[str, Any]] = {
    "string": {"type": "string", "minLength": 1},
    "integer": {"type": "integer"},
    "share": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%?$"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "strings": {"type": "array", "items": {"type": "string"}},
    "settings": {"type": "object"},
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a topology file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rlctl topology",
        **_section(FILE),
        "oneOf": [{"required": ["models"]}, {"required": ["sglang"]}],
    }


def _section(keys: tuple[Key, ...]) -> dict[str, Any]:
    properties = {name: _key(key) for key in keys for name in (key.name, key.alias) if name}
    section: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    required = [key.name for key in keys if key.required and not key.alias]
    if required:
        section["required"] = required
    alternatives = [
        {"oneOf": [{"required": [k.name]}, {"required": [k.alias]}]} for k in keys if k.required and k.alias
    ]
    if alternatives:
        section["allOf"] = alternatives
    return section


def _key(key: Key) -> dict[str, Any]:
    match key.kind:
        case "section":
            described = _section(key.of)
        case "list":
            described = {"type": "array", "minItems": 1, "items": _section(key.of)}
        case "integers":
            described = {"type": "array", "items": {"type": "integer"}}
        case kind:
            described = dict(_TYPES[kind])
    if key.choices:
        described["enum"] = list(key.choices)
    bounded = described["items"] if key.kind == "integers" else described
    if key.least is not None:
        bounded["minimum"] = key.least
    if key.kind in ("integer", "integers"):
        bounded["maximum"] = MOST
    default = f" Default: {key.default}." if key.default else ""
    return {"description": f"{key.meaning}{default}", **described}
