"""The checked-in stubs are those of protos/, and a changed contract is noticed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_stubs_docs_lint_and_compatibility_are_up_to_date() -> None:
    checked = subprocess.run([ROOT / "tools" / "protos", "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, f"run tools/protos:\n{checked.stdout}{checked.stderr}"


def copy(tmp_path: Path) -> Path:
    """The parts of the checkout that tools/protos works on, with the environments that are already made."""
    for name in ("protos", "rlctl", "engines", "tools", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "buf.yaml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    if not (ROOT / ".venv-protos").exists():  # a fresh checkout, of whose tests this is the first
        subprocess.run([ROOT / "tools" / "protos", "--check"], capture_output=True, check=True)
    for name in (".venv", ".venv-protos"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("string model_path = 1;", "string model_directory = 1;"), 'changed name from "model_path"'),
        (("uint32 context_length = 7;", "uint64 context_length = 7;"), "changed type"),
        (("  // Name of the group.\n", "  // Name of the process group.\n"), "is out of date: run tools/protos"),
    ],
)
def test_a_changed_contract_fails_the_check(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    checkout = copy(tmp_path)
    proto = checkout / "protos" / "rlctl" / "v1" / "verbs.proto"
    text = proto.read_text()
    assert change[0] in text
    proto.write_text(text.replace(*change))
    checked = subprocess.run([checkout / "tools" / "protos", "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode != 0
    assert complaint in checked.stdout + checked.stderr
    assert "run tools/protos" in checked.stdout + checked.stderr
