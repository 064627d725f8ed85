"""YAML as a tree of values with lines. Timestamps stay text; tags beyond plain scalars are problems.

Duplicate keys are problems (PyYAML silently keeps the last). Aliases and merge keys work. A document that contains
itself, is nested too deep, or grows beyond a limit through aliases is refused.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.topology.problems import Problems

Value = None | bool | int | float | str

MAX_BYTES = 4 << 20
MAX_NODES = 50_000
MAX_DEPTH = 40

_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "value")}
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Node:
    """A value with the line of its key, or of the list item.

    Attributes:
        value: a scalar, a list of nodes, or a dict of nodes.
        line: 1-based; 0 outside of a file.
    """

    value: Value | list[Node] | dict[str, Node]
    line: int = 0


def read(path: Path, problems: Problems) -> Node | None:
    """Return the document in a file; None, and a problem, for a file without a document."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems.add(0, "", f"it cannot be read: {error.strerror}")
        return None
    if len(raw) > MAX_BYTES:
        problems.add(0, "", f"it is larger than {MAX_BYTES >> 20} MiB")
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        problems.add(raw.count(b"\n", 0, error.start) + 1, "", "it is not UTF-8")
        return None
    return parse(text, problems)


def parse(text: str, problems: Problems) -> Node | None:
    """Return the document in a text; None, and a problem, for a text without a document."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            problems.add(0, "", "it is empty")
            return None
        return _Reader(problems).node(root, "", root.start_mark.line + 1, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = ", ".join(filter(None, (error.context, error.problem)))
        problems.add(mark.line + 1 if mark else 0, "", f"no valid YAML: {message}")
    except yaml.YAMLError as error:
        problems.add(0, "", f"no valid YAML: {' '.join(str(error).split())}")
    except RecursionError:
        problems.add(0, "", "it is nested too deep")
    except _TooLarge:
        problems.add(0, "", f"its aliases make it larger than {MAX_NODES} values")
    return None


def of(data: Any) -> Node:
    """Return a document of Python values, without lines."""
    if isinstance(data, Mapping):
        return Node({str(key): of(value) for key, value in data.items()})
    if isinstance(data, Sequence) and not isinstance(data, str):
        return Node([of(value) for value in data])
    return Node(data)


class _TooLarge(Exception):
    pass


class _Reader:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._scalars = yaml.constructor.SafeConstructor()
        self._read = 0

    def node(self, node: yaml.Node, path: str, line: int, depth: int) -> Node:
        self._read += 1
        if self._read > MAX_NODES:
            raise _TooLarge
        if depth > MAX_DEPTH:  # also reached by a document that contains itself
            raise RecursionError
        match node:
            case yaml.MappingNode():
                return Node(self._mapping(node, path, depth), line)
            case yaml.SequenceNode():
                items = enumerate(node.value)
                return Node(
                    [self.node(item, f"{path}[{i}]", item.start_mark.line + 1, depth + 1) for i, item in items], line
                )
        return Node(self._scalar(node, path, line), line)

    def _mapping(self, mapping: yaml.MappingNode, path: str, depth: int) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, value in mapping.value:
            line = key.start_mark.line + 1
            if key.tag == _MERGE:
                for source in self._merged(value, path, line):
                    merged = {**self._mapping(source, path, depth + 1), **merged}
                continue
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add(line, path, "a key must be a word")
                continue
            name = str(key.value)
            if not name.isprintable():
                self._problems.add(line, path, f"a key must be a word, and {name[:40]!r} is none")
                continue
            below = f"{path}.{name}".removeprefix(".")
            child = self.node(value, below, line, depth + 1)
            if name in own:
                self._problems.add(line, below, f"{name!r} was given already in line {own[name].line}")
            else:
                own[name] = child
        return {**merged, **own}

    def _merged(self, value: yaml.Node, path: str, line: int) -> Iterator[yaml.MappingNode]:
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(source, yaml.MappingNode):
                yield source
            else:
                self._problems.add(line, f"{path}.<<".removeprefix("."), "only mappings can be merged")

    def _scalar(self, node: yaml.Node, path: str, line: int) -> Value:
        if node.tag not in _PLAIN:
            self._problems.add(line, path, f"the tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed")
            return None
        if node.tag.endswith((":timestamp", ":value")):
            return str(node.value)
        try:
            value: Value = self._scalars.construct_object(node)
        except (ValueError, KeyError, OverflowError, yaml.YAMLError):
            self._problems.add(line, path, f"{str(node.value)[:40]!r} is no {node.tag.rpartition(':')[2]}")
            return None
        if isinstance(value, str) and any(unicodedata.category(c) in ("Cc", "Cs") for c in value if c not in "\n\t"):
            # Processes do not accept such arguments, and terminals must not print such values.
            self._problems.add(line, path, f"{value[:40]!r} has characters that are none of a text")
            return None
        return value
