"""The OpenAPI document of a dialect, made from its table."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Sequence
from typing import Any

import orjson

from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Reply, Route, Scope
from rlctl.gateway.http.table import ENGINE, REQUIRED, Field, Row
from rlctl.version import __version__

PATH = "/openapi.json"
_RULE = re.compile(r":[^{}]*\}")
"""The pattern inside a placeholder of a path, from its colon to its closing brace."""

_KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}

COMMON = {
    401: "a token is missing or wrong",
    403: "the token does not allow it",
    404: "no such engine",
    413: "the body is too large",
    503: "no coordinator, or no engine, can be reached",
    504: "the time was up; the outcome is not known",
}
"""Responses that every row may give."""


def served(rows: Sequence[Row], routes: Sequence[Route]) -> Route:
    body = orjson.dumps(document(rows, routes))

    async def openapi(_: Call) -> Reply:
        """Return this document."""
        return Reply(body, content_type="application/json")

    return Route("GET", PATH, openapi, Scope.OPEN)


def document(rows: Sequence[Row], routes: Sequence[Route] = ()) -> dict[str, Any]:
    """Return OpenAPI 3.1: the rows with their fields, and the routes with their names."""
    paths: dict[str, Any] = {}
    for row in rows:
        for prefix in ("", ENGINE):
            for method in row.methods.split():
                paths.setdefault(prefix + row.path, {})[method.lower()] = _of_row(row, prefix, method)
    for route in routes:
        for method in route.methods.split():
            paths.setdefault(_RULE.sub("}", route.path), {})[method.lower()] = _of_route(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rlctl: SGLang's dialect",
            "version": __version__,
            "description": "A fleet behind SGLang's HTTP interface. X-RLCTL-Unknown-Fields names what is ignored.",
        },
        "paths": dict(sorted(paths.items())),
    }


def _of_row(row: Row, prefix: str, method: str) -> dict[str, Any]:
    answers = COMMON | {400: "what is wrong"} | dict(row.answers)
    operation: dict[str, Any] = {
        "summary": row.about,
        "parameters": [*_of_path(prefix), *map(_parameter, row.query)],
        "responses": {str(status): {"description": about} for status, about in sorted(answers.items())},
    }
    if row.note or row.verbs:
        operation["description"] = " ".join(
            filter(None, [row.note and f"{row.note}.", row.verbs and f"Verbs: {row.verbs}."])
        )
    if row.fields and method == "POST":
        required = [each.name for each in row.fields if each.default is REQUIRED]
        schema = {"type": "object", "properties": {each.name: _schema(each) for each in row.fields}}
        if required:
            schema["required"] = required
        operation["requestBody"] = {"required": bool(required), "content": {"application/json": {"schema": schema}}}
    return operation


def _of_route(route: Route) -> dict[str, Any]:
    answers = {200: "the answer", 400: "what is wrong"} | COMMON
    return {
        "summary": route.about,
        "parameters": _of_path(route.path),
        "responses": {str(status): {"description": about} for status, about in sorted(answers.items())},
    }


def _of_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _parameter(each: Field) -> dict[str, Any]:
    return {"name": each.name, "in": "query", "required": False, "schema": _type(each.kind)}


def _schema(each: Field) -> dict[str, Any]:
    schema = _type(each.kind)
    if each.choices:
        schema["enum"] = [*each.choices, *([None] if each.default is None else [])]
    if each.default is not REQUIRED:
        schema["default"] = each.default
        if "type" in schema:
            schema["type"] = [*([schema["type"]] if isinstance(schema["type"], str) else schema["type"]), "null"]
    if each.doc or each.own:
        schema["description"] = "; ".join(filter(None, [each.doc, "rlctl's own" if each.own else ""]))
    return schema


@functools.singledispatch
def _type(kind: Any) -> dict[str, Any]:
    return {"type": _KINDS[kind]}


@_type.register(list)
def _(kind: list[Any]) -> dict[str, Any]:
    return {"type": "array", "items": _type(kind[0])}


@_type.register(types.UnionType)
def _(kind: types.UnionType) -> dict[str, Any]:
    return {"type": [_KINDS[each] for each in kind.__args__]}
