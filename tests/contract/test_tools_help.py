"""``tools/X --help`` prints the use of a tool, and makes and changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("check", "chromium", "clients", "docs", "gpu", "helm", "prometheus", "protos")
PROGRAMS = ("bash", "basename", "dirname", "sed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the tools only, beside the programs that a tool may use for its help."""
    shutil.copytree(ROOT / "tools", tmp_path / "checkout" / "tools")
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path / "checkout"


def run(checkout: Path, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a tool by a relative path, with a PATH that can neither make an environment nor regenerate anything."""
    return subprocess.run(
        [f"checkout/tools/{tool}", *arguments],
        cwd=checkout.parent,
        env={"PATH": str(checkout.parent / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def contents(checkout: Path) -> list[str]:
    return sorted(str(path) for path in checkout.rglob("*"))


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_printed_and_nothing_is_made(checkout: Path, tool: str, option: str) -> None:
    before = contents(checkout)
    told = run(checkout, tool, option)
    assert (told.returncode, told.stderr) == (0, "")
    assert f"  tools/{tool}" in told.stdout
    assert contents(checkout) == before


def test_an_unknown_argument_regenerates_nothing(checkout: Path) -> None:
    before = contents(checkout)
    told = run(checkout, "protos", "--chekc")
    assert (told.returncode, told.stdout) == (2, "")
    assert "tools/protos --check" in told.stderr
    assert contents(checkout) == before


def test_every_tool_is_known() -> None:
    """The other tools pass --help on to a program, or print their use for every unknown argument."""
    executable = {path.name for path in (ROOT / "tools").iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert executable - set(TOOLS) == {"bench", "demo", "engines", "fuzz", "simulate", "test"}
