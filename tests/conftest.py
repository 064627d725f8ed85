"""Fixtures for every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlctl.testing import fake_engine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], str]:
    """Makes checkpoints of the fake engine: ``checkpoint("text")`` is a directory whose weights are that text."""

    def make(text: str) -> str:
        directory = tmp_path / f"checkpoint-{text}"
        directory.mkdir(exist_ok=True)
        (directory / "weights.txt").write_text(text)
        return str(directory)

    return make


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    yield
    fake_engine.FAULTS.clear()
