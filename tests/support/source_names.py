"""Names that a module defines, for tests of documents and docstrings."""

from __future__ import annotations

import ast
from pathlib import Path


def defined(path: Path) -> set[str]:
    """Return functions, classes, methods (``Class.method``) and variables of a module."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            members = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {node.name, *(f"{node.name}.{member}" for member in members)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names
