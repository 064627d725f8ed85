"""docs/reference/dialect-sglang.md and openapi-sglang.json: the dialect's table for clients."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rlctl.gateway.dialects.sglang.dialect import GENERATING, ROWS
from rlctl.gateway.http.openapi import document
from rlctl.gateway.http.table import REQUIRED, Field
from tools.reference.markdown import prose, table

_ABOUT = """\
Every route exists twice: at an engine's own address, `/engines/{slot}/...`, and for the fleet at the root. The fields
are SGLang's; fields in italics are rlctl's own. [Dialects](../dialects.md#different-on-purpose) lists the differences.
"""


def page() -> Iterator[str]:
    """Yield the table."""
    yield "# SGLang's dialect\n"
    yield from prose(_ABOUT)
    rows = [
        [
            row.methods.replace(" ", ", "),
            f"`{row.path}`",
            ", ".join(map(_field, (*row.fields, *row.query))),
            row.verbs,
            row.note,
        ]
        for row in ROWS
    ]
    yield from table(["methods", "route", "fields", "verbs", "different from SGLang"], rows)


def openapi() -> Iterator[str]:
    """Yield the OpenAPI document."""
    yield json.dumps(document(ROWS, GENERATING), indent=1, sort_keys=True)


def _field(each: Field) -> str:
    mark = "*" if each.own else "`"
    default = "" if each.default is REQUIRED else f" = {json.dumps(each.default)}"
    return f"{mark}{each.name}{default}{mark}"
