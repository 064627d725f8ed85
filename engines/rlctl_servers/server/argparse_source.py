"""Arguments of an installed product, read from its source text. Nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def installed(python: str, package: str) -> Iterator[Path]:
    """Yield the directories of a package ("sglang/srt") in the environment of an interpreter."""
    yield from sorted(Path(python).parent.parent.glob(f"lib/python*/site-packages/{package}"))


def parsed(file: Path) -> ast.Module | None:
    """Return the syntax tree of a file, or None if the file cannot be read or parsed."""
    try:
        return ast.parse(file.read_text())
    except (OSError, SyntaxError):
        return None


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of ``add_argument`` in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node


def added(call: ast.Call) -> list[str]:
    """Return the names of the argument that a call of ``add_argument`` adds."""
    return [name for argument in call.args for name in names(argument)]


def names(node: ast.AST | None) -> list[str]:
    """Return the argument names in an expression: "tp_size" for "--tp-size"."""
    nodes = ast.walk(node) if node is not None else ()
    return [
        part.value.removeprefix("--").replace("-", "_")
        for part in nodes
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and re.match("--[a-z]", part.value)
    ]


def version(site_packages: Path, *distributions: str) -> str:
    """Return the version of the first installed distribution, or ""."""
    for distribution in distributions:
        for information in site_packages.glob(f"{distribution}-*.dist-info"):
            return information.name.removeprefix(f"{distribution}-").removesuffix(".dist-info")
    return ""
