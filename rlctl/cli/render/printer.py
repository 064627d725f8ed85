"""The one printer: every command gives it data once, and it comes out as a table, JSON, YAML or names.

JSON is protojson with the field names of the protos. Fields without presence are always there, with their default
value, so that a script need not guess; message fields and ``optional`` ones are there when they are set; 64-bit
numbers are strings, as protojson has them.
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
"""Padding at the end of a line, which a narrow terminal would wrap into empty ones."""


_RESET = "\x1b[0m"


@dataclass(frozen=True)
class View:
    """Something to print, in every format.

    Attributes:
        data: a message, a dict, or a list of them; a list is an array in JSON and one line each in jsonl.
        tables: the tables; the argument asks for the wide ones.
        names: what ``-o name`` prints, a line each.
        whole_ids: digests are not shortened on a terminal either.
    """

    data: Message | dict[str, Any] | Sequence[Message | dict[str, Any]]
    tables: Callable[[bool], list[Table]]
    names: Callable[[], list[str]]
    whole_ids: bool = False


def show(settings: Settings, view: View) -> None:
    """Print it on stdout as the settings say."""
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
    """Print tables on stdout. ``overflow``: lines may be longer than the terminal is wide, and nothing is cut."""
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
    """Messages as what JSON can hold."""
    if isinstance(data, Message):
        from google.protobuf.json_format import MessageToDict

        told = copy.deepcopy(data)
        _spell(told)
        fields = MessageToDict(told, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return _in_order(data.DESCRIPTOR, fields)
    if isinstance(data, dict):
        return data
    return [plain_data(item) for item in data]


def _spell(message: Any) -> None:
    """Write the numbers of a Struct that JSON has not as protojson writes those of other fields; there it refuses."""
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
    """The fields of a message in the order of its proto, at every level; entries of a map by key."""
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
