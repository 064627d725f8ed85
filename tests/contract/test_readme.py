"""The README's code is the example's; commands and names of README and guides exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOPS = ("rlctl", "engines", "tests", "tools")
DOCUMENTS = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "reference"]
PACKAGES = tuple(f"{path.parent.name}/" for top in TOPS for path in (ROOT / top).glob("*/__init__.py"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_trainer_is_the_example() -> None:
    (code,) = blocks("python")
    example = (ROOT / "examples" / "trainer.py").read_text()
    assert example.endswith(code)
    assert len(code.strip().splitlines()) <= 22


def test_the_example_without_its_argument_says_how_it_is_used() -> None:
    command = [sys.executable, ROOT / "examples" / "make_tiny_model.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: make_tiny_model.py [-h] [--experts] directory")


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"(?<![\w/])((?:tools|examples|docs)/[\w./-]+)", README)
    assert named
    for path in named:
        assert (ROOT / path.rstrip(".")).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT / "docs").as_posix())
def test_modules_that_a_document_names_exist(document: Path) -> None:
    modules = [path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*.py")]
    for name in re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`", document.read_text()):
        if name.startswith((*PACKAGES, *(f"{top}/" for top in TOPS))):  # other projects' files are named as well
            assert any(path.endswith("/" + name) or path == name for path in modules), name
