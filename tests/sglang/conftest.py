"""A real SGLang server for each module that asks for one; without SGLang's environment the tier is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_sglang import SGLangEngine
from rlctl_sglang.options import Options, interpreter
from server_stage import Driver

from rlctl.errors import RlctlError


@pytest.fixture(scope="session", autouse=True)
def sglang() -> str:
    """The Python that SGLang is installed for."""
    try:
        return interpreter(Options())
    except RlctlError as error:
        pytest.skip(f"SGLang is not installed: {error.next_step}")


@pytest.fixture(scope="module")
def driver(sglang: str, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A server of one rank."""
    driver = Driver(SGLangEngine, tiny[1], options={"allowed_roots": str(tiny[1].parent.parent)})
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()
