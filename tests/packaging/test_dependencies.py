"""The dependencies of pyproject.toml are those of docs/dependencies.md, and the extras are as small as they say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TYPES = re.compile(r"types-\w")


def table() -> dict[str, str]:
    """Package → its range."""
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (.*?) \| .+ \|$", text, re.MULTILINE)
    found: dict[str, str] = {}
    for packages, ranges in rows:
        names = [name.strip() for name in packages.partition(" (")[0].split(",")]
        each = ranges.split("; ")
        for index, name in enumerate(names):
            found.setdefault(name, each[index] if len(each) > 1 else ranges)
    return found


def closure(extra: str) -> set[str]:
    """Names of the packages that an extra brings, through other extras too; those of rlctl itself are not in it."""
    names = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        names |= set().union(*map(closure, requirement.extras)) if requirement.name == "rlctl" else {requirement.name}
    return names


DECLARED = sorted({*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)})


@pytest.mark.parametrize("declared", [each for each in DECLARED if not each.startswith("rlctl[")])
def test_a_dependency_is_documented_with_its_range(declared: str) -> None:
    requirement = Requirement(declared)
    if TYPES.match(requirement.name):
        assert "types-\\*" in table()
        return
    documented = re.findall(r"\d[\d.]*", table()[requirement.name])
    assert {spec.version for spec in requirement.specifier} == set(documented)


def test_the_environment_of_the_quick_check_has_neither_torch_nor_ray() -> None:
    heavy = {"torch", "transformers", "safetensors", "numpy", "ray"}
    assert not closure("dev-core") & heavy
    assert {"torch", "ray"} <= closure("dev")


def test_the_environment_of_all_tests_has_what_each_extra_brings() -> None:
    assert set().union(*map(closure, EXTRAS)) == closure("dev")
