"""What an installed product's source says about its arguments. Nothing of it is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def installed(python: str, package: str) -> Iterator[Path]:
    """The directories of a package ("sglang/srt") in the environment of an interpreter."""
    yield from sorted(Path(python).parent.parent.glob(f"lib/python*/site-packages/{package}"))


def parsed(file: Path) -> ast.Module | None:
    """A file's syntax tree; None when it cannot be read."""
    try:
        return ast.parse(file.read_text())
    except (OSError, SyntaxError):
        return None


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """A tree's calls of ``add_argument``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node


def added(call: ast.Call) -> list[str]:
    """Names of the argument that a call of ``add_argument`` adds."""
    return [name for argument in call.args for name in names(argument)]


def names(node: ast.AST | None) -> list[str]:
    """Names of arguments written in an expression: "tp_size" for "--tp-size"."""
    found = ast.walk(node) if node is not None else ()
    return [
        part.value.removeprefix("--").replace("-", "_")
        for part in found
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and re.match("--[a-z]", part.value)
    ]


def version(site_packages: Path, *distributions: str) -> str:
    """The version of the first of the distributions that is installed there, or ""."""
    for distribution in distributions:
        for information in site_packages.glob(f"{distribution}-*.dist-info"):
            return information.name.removeprefix(f"{distribution}-").removesuffix(".dist-info")
    return ""
