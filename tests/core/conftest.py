"""The tier of the quick check: it runs where neither torch nor Ray is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEAVY = ("torch", "transformers", "ray")


def pytest_configure(config: pytest.Config) -> None:
    """When no other tier is run, imports of HEAVY fail as in .venv-core, wherever they are installed."""
    if all(Path(argument.partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args):
        for name in HEAVY:
            assert name not in sys.modules, f"{name} is imported by what every tier imports"
            sys.modules[name] = None  # type: ignore[assignment]
