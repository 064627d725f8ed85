"""docs/reference/verbs.md: the verb table and the comments of the protos."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Set
from typing import Any

from rlctl.cli.commands.verbs import about
from rlctl.contract import comments
from rlctl.contract.access import method_of
from rlctl.contract.comments import ANSWERS, PACKAGE, comment, type_name
from rlctl.contract.scopes import Scope
from rlctl.contract.verbs import VERBS, Verb
from rlctl.v1 import coordinator_pb2, results_pb2, rollout_pb2
from tools.reference.markdown import table

_DATA: Mapping[str, Any] = {
    field.name: field for field in results_pb2.RankResult.DESCRIPTOR.oneofs_by_name["data"].fields
}


def page() -> Iterator[str]:
    """Yield the verbs of the table, the steps of updates, other RPCs, generation, and the messages of these."""
    offered = [verb for verb in VERBS.values() if verb.fleet]
    yield "# Verbs and other RPCs\n"
    yield (
        "The admin verbs are the same on `CoordinatorService`, `StageService` and `WorkerService`. They answer with an "
        "operation, the result of a stage, and the result of a rank. Every request has a [header](#requestheader).\n"
    )
    rows = [
        [
            f"[{verb.name}](#{verb.name.lower()})",
            f"`rlctl {verb.cli}`" if verb.cli else "",
            f"{verb.deadline_s:g} s",
            about(verb)[0],
        ]
        for verb in offered
    ]
    yield from table(["verb", "command", "deadline", "what it does"], rows)
    yield "## Verbs\n"
    for verb in offered:
        yield from _verb(verb)
    yield "## Steps of an update\n"
    yield "The coordinator sends these verbs. `StageService` and `WorkerService` have their RPCs.\n"
    for verb in VERBS.values():
        if not verb.fleet:
            yield from _verb(verb)
    in_table = {verb.name for verb in offered}
    for service, title in (
        (coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"], "Other RPCs of CoordinatorService"),
        (rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"], "RolloutService"),
    ):
        yield f"## {title}\n"
        for method in service.methods:
            if method.name not in in_table:
                yield from _rpc(service.name, method)
    yield from _messages("Data of a rank", _data_types())
    yield from _messages("Messages and enums that requests are made of", _shared_types())


def _verb(verb: Verb) -> Iterator[str]:
    text, answers = about(verb)
    yield f"### {verb.name}\n"
    yield f"{text}\n"
    facts = [("Command", f"`rlctl {verb.cli}`")] if verb.cli else []
    facts += [(question, answers[question]) for question in ANSWERS if question in answers]
    if "Deadline" not in answers:
        facts.append(("Deadline", f"{verb.deadline_s:g} s."))
    facts.append(("Scope", _scopes(verb.scopes)))
    facts.append(("Kind", _kind(verb)))
    facts.append(("Carried out by a stage that is", ", ".join(_in_order(verb.states))))
    if verb.data:
        facts.append(("Data of each rank", f"`{verb.data}`: {_type(_DATA[verb.data])}"))
    yield from table(["", ""], facts)
    yield from _fields(verb.request.DESCRIPTOR)


def _kind(verb: Verb) -> str:
    parts = ["a change: journaled, fenced" if verb.mutating else "a read: not recorded, never behind a change"]
    if verb.reads_if is not None:
        parts.append("a read unless the request changes something")
    if verb.ordered:
        parts.append("all ranks carry it out at one step of the engine")
    if verb.mutating and not verb.waits:
        parts.append("gets through while another change runs")
    if verb.in_update:
        parts.append("part of a weight update")
    return "; ".join(parts)


def _in_order(states: frozenset[str]) -> list[str]:
    order = [value.name for value in coordinator_pb2.DESCRIPTOR.pool.FindEnumTypeByName(f"{PACKAGE}.StageState").values]
    return sorted(states, key=lambda state: order.index(f"STAGE_STATE_{state}"))


def _scopes(scopes: tuple[Scope, ...]) -> str:
    return f"[{' or '.join(scope.value for scope in scopes)}](../access.md#scopes)"


def _rpc(service: str, method: Any) -> Iterator[str]:
    text, answers = comments.rpc(service, method.name)
    streams = "a stream of " if method.server_streaming else ""
    yield f"### {method.name}\n"
    yield f"{text}\n"
    rows = [(question, answers[question]) for question in ANSWERS if question in answers]
    rows.append(("Scope", _scopes(method_of(f"/{PACKAGE}.{service}/{method.name}").scopes)))
    yield from table(["", ""], [*rows, ("Answers", f"{streams}`{method.output_type.name}`")])
    yield from _fields(method.input_type)


def _fields(message: Any) -> Iterator[str]:
    rows = [[f"`{field.name}`", _type(field), comment(f"{message.full_name}.{field.name}")] for field in message.fields]
    yield f"Fields of `{message.name}`:\n"
    yield from table(["field", "type", "meaning"], rows)


def _type(field: Any) -> str:
    kind = field.message_type or field.enum_type
    if kind is None or kind.full_name not in _shared_types() | _data_types():
        return f"`{type_name(field)}`"
    return ("repeated " if field.is_repeated else "") + f"[{kind.name}](#{kind.name.lower()})"


def _messages(title: str, kinds: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {title}\n"
    for kind in kinds.values():
        yield f"### {kind.name}\n"
        yield f"{comment(kind.full_name)}\n"
        if hasattr(kind, "fields"):
            yield from _fields(kind)
        else:
            rows = [[f"`{value.name}`", comment(f"{kind.full_name}.{value.name}")] for value in kind.values]
            yield from table(["value", "meaning"], rows)


@functools.cache
def _shared_types() -> dict[str, Any]:
    """Return the contract's messages and enums that requests contain, by full name, messages first."""
    requests: list[Any] = [verb.request.DESCRIPTOR for verb in VERBS.values()]
    for file, name in ((coordinator_pb2, "CoordinatorService"), (rollout_pb2, "RolloutService")):
        requests += [method.input_type for method in file.DESCRIPTOR.services_by_name[name].methods]
    return _contained(requests, {message.full_name for message in requests})


@functools.cache
def _data_types() -> dict[str, Any]:
    """Return the data messages of verbs, and the messages and enums that only these contain, as `_shared_types`."""
    data = {field.message_type.full_name: field.message_type for field in _DATA.values()}
    return {name: kind for name, kind in data.items() if name not in _shared_types()} | _contained(
        list(data.values()), data.keys() | _shared_types().keys()
    )


def _contained(todo: list[Any], excluded: Set[str]) -> dict[str, Any]:
    """Return the messages and enums of the contract in fields of these messages, except the excluded names."""
    kinds: dict[str, Any] = {}
    while todo:
        for field in todo.pop(0).fields:
            kind: Any = field.message_type or field.enum_type
            if kind is None or kind.file.package != PACKAGE or kind.full_name in excluded | kinds.keys():
                continue
            kinds[kind.full_name] = kind
            if field.message_type is not None and not kind.GetOptions().map_entry:
                todo.append(kind)
    return {kind.full_name: kind for kind in sorted(kinds.values(), key=lambda kind: not hasattr(kind, "fields"))}
