"""Each package says in its docstring what it is for, what it imports and where to start. Names in docstrings exist."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_names import defined

ROOT = Path(__file__).parents[2]
STAND_INS = ("rlctl/v1", "engines/rlctl_sglang/cpu")  # generated, and modules of other projects' names


def packages() -> Iterator[str]:
    for folder in ("rlctl", "engines", "tests/fuzz", "tests/simulator", "tools/reference"):
        for path in sorted((ROOT / folder).rglob("__init__.py")):
            name = path.parent.relative_to(ROOT).as_posix()
            if not name.startswith(STAND_INS):
                yield name


PACKAGES = list(packages())


def docstring(package: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_for_what_it_imports_and_where_to_start(package: str) -> None:
    text = docstring(package)
    assert len(text.partition("\nImports: ")[0].split()) > 5
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


ROOTS = {"rlctl": "", "tests": "", "rlctl_servers": "engines", "rlctl_sglang": "engines", "rlctl_torch": "engines"}
ROOTS |= {"rlctl_vllm": "engines"}
REFERENCE = re.compile(r":(mod|class|func):`~?([\w.]+)`")


def modules() -> Iterator[Path]:
    for folder in ("rlctl", "engines", "tests", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.relative_to(ROOT).as_posix().startswith("rlctl/v1/"):
                yield path


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    """All names that a module defines or imports, in any scope, and the strings of its tables of names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            names.add(node.value)
    return frozenset(names)


def module_of(words: list[str]) -> tuple[Path, list[str]] | None:
    """The longest module that a dotted name starts with, and the rest of the name."""
    for count in range(len(words), 0, -1):
        place = (ROOT / ROOTS[words[0]]).joinpath(*words[:count])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists():
                return path, words[count:]
    return None


def dead(path: Path) -> Iterator[str]:
    """The references of a module to modules, classes and functions that do not exist."""
    for kind, name in REFERENCE.findall(path.read_text()):
        words = name.split(".")
        if name.startswith("."):
            above = len(name) - len(name.lstrip("."))
            folder = path.parents[above - 1].relative_to(ROOT)
            words = [part for part in folder.parts if part != "engines"] + words[above:]
        if words[0] in ROOTS:
            resolved = module_of(words)
            exists = resolved is not None and not (kind == "mod" and resolved[1])
            if exists and resolved is not None and resolved[1]:
                exists = resolved[1][0] in names_of(resolved[0])
        else:  # a name of this module, or of the standard library
            exists = kind != "mod" and (words[0] in names_of(path) or words[0] in sys.stdlib_module_names)
        if not exists:
            yield f"{path.relative_to(ROOT)}: :{kind}:`{name}`"


def test_the_modules_and_names_that_docstrings_refer_to_exist() -> None:
    assert [each for path in modules() for each in dead(path)] == []
