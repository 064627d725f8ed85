"""The script that runs what needs a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "gpu"


def parts() -> dict[str, tuple[int, list[str]]]:
    """Seconds and arguments of pytest, by part."""
    table = re.search(r'PARTS="(.*?)"', TOOL.read_text(), re.DOTALL)
    assert table is not None
    rows = [line.split() for line in table[1].splitlines()]
    return {name: (int(limit), arguments) for name, limit, *arguments in rows}


def test_it_runs_every_test_that_needs_a_gpu_within_ten_minutes() -> None:
    needing = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and re.search(r"no GPU is visible|, NO_GPU\]", path.read_text())
    }
    run = {argument for _, arguments in parts().values() for argument in arguments if argument.endswith(".py")}
    assert run == needing
    assert sum(limit for limit, _ in parts().values()) <= 600


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
@pytest.mark.parametrize(("arguments", "said"), [([], "no GPU is visible"), (["sglnag"], "PART")])
def test_without_a_gpu_or_with_an_unknown_part_it_runs_nothing(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [TOOL, "--python", sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
