"""The printer of all commands: prints the data of a command as a table, JSON, YAML or names.

JSON is protojson with the field names of the protos. Fields without presence are always printed, with the default
value, so that a script need not guess. Message fields and ``optional`` fields are printed if set. 64-bit numbers are
strings, as in protojson.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from google.protobuf.message import Message

from rlctl.cli.app.settings import Settings
from rlctl.cli.render import tables
from rlctl.cli.render.tables import Table
from rlctl.contract.comments import PACKAGE

_TRAILING = re.compile(r"(?:\s|\x1b\[[0-9;]*m)+$")
"""Padding at the end of a line. A narrow terminal would wrap the padding into empty lines."""


_RESET = "\x1b[0m"


@dataclass(frozen=True)
class View:
    """Data for every output format.

    Attributes:
        data: a message, a dict, or a list of them; a list is an array in JSON and a line each in jsonl.
        tables: function that returns the tables; the argument selects the wide tables.
        names: function that returns the lines of ``-o name``.
        whole_ids: digests are not shortened on a terminal either.
    """

    data: Message | dict[str, Any] | Sequence[Message | dict[str, Any]]
    tables: Callable[[bool], list[Table]]
    names: Callable[[], list[str]]
    whole_ids: bool = False


def show(settings: Settings, view: View) -> None:
    """Print a view on stdout in the format of the settings."""
    match settings.output:
        case "json":
            click.echo(json.dumps(plain_data(view.data), indent=2, ensure_ascii=False))
        case "jsonl":
            items = view.data if isinstance(view.data, Sequence) else [view.data]
            for item in items:
                click.echo(json.dumps(plain_data(item), ensure_ascii=False))
        case "yaml":
            import yaml

            click.echo(yaml.safe_dump(plain_data(view.data), sort_keys=False, allow_unicode=True), nl=False)
        case "name":
            for name in view.names():
                click.echo(name)
        case form:
            wide = form == "wide"
            show_tables(settings, view.tables(wide), whole_ids=wide or view.whole_ids, overflow=wide)


def show_tables(settings: Settings, shown: Sequence[Table], *, whole_ids: bool = False, overflow: bool = False) -> None:
    """Print tables on stdout. ``overflow``: lines may be longer than the terminal's width, and no cell is cut."""
    console = tables.console(settings.color, overflow=overflow)
    if console is None:
        click.echo(tables.plain(shown))
        return
    with console.capture() as captured:
        shortened = sys.stdout.isatty() and not whole_ids
        console.print(tables.rich(shown, width=console.width, whole_ids=not shortened))
    for line in captured.get().splitlines():
        click.echo(_TRAILING.sub(_RESET if _RESET in line else "", line), color=True)


def plain_data(data: Any) -> Any:
    """Return messages as values for JSON."""
    if isinstance(data, Message):
        from google.protobuf.json_format import MessageToDict

        message = copy.deepcopy(data)
        _spell(message)
        fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return _in_order(data.DESCRIPTOR, fields)
    if isinstance(data, dict):
        return data
    return [plain_data(item) for item in data]


def _spell(message: Any) -> None:
    """Write NaN and infinities of a Struct as the strings of protojson: in a Struct protojson refuses these numbers."""
    for field, value in message.ListFields():
        if field.full_name == "google.protobuf.Value.number_value" and not math.isfinite(value):
            message.string_value = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        elif isinstance(value, Message):
            _spell(value)
        elif field.is_repeated:
            for each in value.values() if isinstance(value, Mapping) else value:
                if isinstance(each, Message):
                    _spell(each)


def _in_order(descriptor: Any, fields: Any) -> Any:
    """Return the fields of a message in the order of the proto, at every level; entries of a map by key."""
    if descriptor is not None and descriptor.GetOptions().map_entry:
        return dict(sorted(fields.items()))
    if descriptor is None or descriptor.file.package != PACKAGE:
        return fields
    if isinstance(fields, list):
        return [_in_order(descriptor, each) for each in fields]
    return {
        field.name: _in_order(field.message_type, fields[field.name])
        for field in descriptor.fields
        if field.name in fields
    }
