"""``rlctl explain``: the contract's text for a message, field, enum, value, service, RPC or reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import click
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, MethodDescriptor, ServiceDescriptor

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table, prose
from rlctl.contract.comments import PACKAGE, comment, comments, type_name
from rlctl.contract.enums import short_name
from rlctl.contract.errors import Reason


@click.command(cls=Command)
@click.argument("name")
@pass_settings
def explain(settings: Settings, name: str) -> None:
    """Explain a message, field, enum, value, service or RPC in the words of the contract, or the reason of an error.

    \b
    For example:
      rlctl explain PauseGenerationRequest.mode
      rlctl explain UpdateWeightsFromDiskRequest.options.pause
      rlctl explain StageState
      rlctl explain PauseGeneration
      rlctl explain STALE
      rlctl explain NO_ROUTABLE_STAGE
    """
    if name.upper() in Reason.__members__:
        show(settings, _reason(Reason[name.upper()]))
        return
    full = _resolve(name)
    about = {"name": full.removeprefix(f"{PACKAGE}."), **_kind(full), "comment": comment(full)}
    members = list(_members(full))
    data = {**about, **({"members": members} if members else {})}
    show(settings, View(data, lambda _: list(_tables(about, members)), lambda: [str(about["name"])]))


def _reason(reason: Reason) -> View:
    about = {
        "name": reason.name,
        "type": f"reason  {reason.exception.status}  (rlctl.{reason.exception.__name__})",
        "comment": "\n".join(filter(None, [reason.meaning, reason.next_step])),
    }
    return View(about, lambda _: list(_tables(about, [])), lambda: [reason.name])


def _tables(about: dict[str, str], members: list[dict[str, str]]) -> Iterator[Table]:
    title = f"{about['name']}  {about['type']}".rstrip()
    yield prose(about["comment"].splitlines(), title=title)
    if members:
        rows = [[each["name"], each["type"], " ".join(each["comment"].split())] for each in members]
        numbered = all(each["type"].isdigit() for each in members)
        yield Table(("NAME", "NUMBER" if numbered else "TYPE", "MEANING"), rows, frozenset({"TYPE"}))


def _resolve(name: str) -> str:
    """Return the full name of a name without the package, or of an RPC without the service. Raises FIELD_INVALID."""
    relative_name = name.removeprefix(f"{PACKAGE}.")
    full_names = {full.removeprefix(f"{PACKAGE}.").lower(): full for full in comments()}
    for candidate in (
        relative_name,
        *(f"{service}.{relative_name}" for service in ("CoordinatorService", "RolloutService")),
    ):
        if candidate.lower() in full_names:
            return full_names[candidate.lower()]
    values = [full for full in comments() if relative_name and _value(full) == relative_name.lower()]
    if len(values) == 1:
        return values[0]
    nested_name = _through_messages(relative_name)
    if nested_name:
        return nested_name
    candidates = values or [
        full_names[each] for each in difflib.get_close_matches(relative_name.lower(), full_names, n=3)
    ]
    hint = ", ".join(each.removeprefix(f"{PACKAGE}.") for each in candidates)
    why = f"several values of the contract are called {name!r}" if values else f"the contract has no {name!r}"
    raise Reason.FIELD_INVALID.error(why, field="name", next_step=f"Did you mean: {hint}?" if hint else "")


def _value(full: str) -> str:
    """Return the short name of an enum value, shown by tables in capitals; "" for anything else."""
    scope, _, last = full.rpartition(".")
    enum = _find_enum(scope)
    return short_name(enum, enum.values_by_name[last].number) if enum is not None else ""


def _through_messages(path: str) -> str:
    """Return the full name of a path through message fields: Request.options.pause. "" for an invalid path."""
    first, *rest = path.split(".")
    message: Descriptor | None = _find_message(f"{PACKAGE}.{first}")
    full = ""
    for part in rest:
        field = message.fields_by_name.get(part) if message is not None else None
        if field is None:
            return ""
        assert message is not None
        full, message = f"{message.full_name}.{part}", field.message_type
    return full


def _kind(full: str) -> dict[str, str]:
    """Return the kind of a name: the type of a field, the number of a value, request and answer of an RPC."""
    scope, _, last = full.rpartition(".")
    message = _find_message(scope)
    if message is not None and last in message.fields_by_name:
        return {"type": type_name(message.fields_by_name[last])}
    enum = _find_enum(scope)
    if enum is not None:
        return {"type": f"= {enum.values_by_name[last].number}"}
    if _find_message(full) is not None:
        return {"type": "message"}
    if _find_enum(full) is not None:
        return {"type": "enum"}
    service = _find_service(scope)
    if service is not None:
        return {"type": _signature(service.methods_by_name[last])}
    return {"type": "service"}


def _signature(method: MethodDescriptor) -> str:
    request_prefix, response_prefix = (
        "stream " if streams else "" for streams in (method.client_streaming, method.server_streaming)
    )
    return f"({request_prefix}{method.input_type.name}) returns ({response_prefix}{method.output_type.name})"


def _members(full: str) -> Iterator[dict[str, str]]:
    """Yield RPCs of a service, fields of a message or values of an enum, also for the type of a field."""
    scope, _, last = full.rpartition(".")
    outer = _find_message(scope)
    field = outer.fields_by_name.get(last) if outer is not None else None
    message = field.message_type if field is not None else _find_message(full)
    enum = field.enum_type if field is not None else _find_enum(full)
    service = _find_service(full)
    if service is not None:
        for method in service.methods:
            first = comment(method.full_name).partition("\n\n")[0]
            yield {"name": method.name, "type": _signature(method), "comment": first}
    elif enum is not None and enum.file.package == PACKAGE:
        for value in enum.values:
            yield {
                "name": value.name,
                "type": str(value.number),
                "comment": comment(f"{enum.full_name}.{value.name}"),
            }
    elif message is not None and message.file.package == PACKAGE:
        for each in message.fields:
            yield {"name": each.name, "type": type_name(each), "comment": comment(f"{message.full_name}.{each.name}")}


def _find_message(name: str) -> Descriptor | None:
    descriptor: Descriptor | None = _find(descriptor_pool.Default().FindMessageTypeByName, name)
    return descriptor


def _find_enum(name: str) -> EnumDescriptor | None:
    descriptor: EnumDescriptor | None = _find(descriptor_pool.Default().FindEnumTypeByName, name)
    return descriptor


def _find_service(name: str) -> ServiceDescriptor | None:
    descriptor: ServiceDescriptor | None = _find(descriptor_pool.Default().FindServiceByName, name)
    return descriptor


def _find(find: Any, name: str) -> Any:
    """Return the descriptor of a name in the pool. The import of the stubs fills the pool."""
    from rlctl.v1 import control_pb2, coordinator_pb2, journal_pb2, rollout_pb2, stage_pb2, worker_pb2

    assert all((control_pb2, coordinator_pb2, journal_pb2, rollout_pb2, stage_pb2, worker_pb2))
    try:
        return find(name)
    except KeyError:
        return None
