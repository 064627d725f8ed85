"""Each package says in its docstring what it may import and where to start reading, and the files and names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAND_INS = ("rlctl/v1", "engines/rlctl_sglang/cpu")  # generated, and modules of other projects' names


def packages() -> Iterator[str]:
    for folder in ("rlctl", "engines", "tests/simulator", "tools/reference"):
        for path in sorted((ROOT / folder).rglob("__init__.py")):
            name = path.parent.relative_to(ROOT).as_posix()
            if name != "rlctl" and not name.startswith(STAND_INS):
                yield name


PACKAGES = list(packages())


def docstring(package: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""


def defined(path: Path) -> set[str]:
    """Functions, classes, methods (``Class.method``) and variables of a module."""
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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_imports_and_where_to_start(package: str) -> None:
    text = docstring(package)
    assert "\nImports: " in text
    assert "\nStart with " in text
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_and_names_in_the_docstring_of_a_package_exist(package: str) -> None:
    text = " ".join(docstring(package).split())
    for file, names in re.findall(r"``([\w/]+\.py)``(?: \(([^)]*)\))?", text):
        places = (ROOT / package / file, ROOT / "rlctl" / file, ROOT / file)
        path = next((place for place in places if place.exists()), None)
        assert path is not None, file
        for name in re.findall(r"``([A-Za-z_][\w.]*)``", names):
            assert name in defined(path), f"{file}: {name}"
