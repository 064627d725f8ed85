"""A real vLLM server that the modules share; without vLLM's environment the tier is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.options import Options, interpreter
from server_stage import Driver

from rlctl.errors import RlctlError


@pytest.fixture(scope="session", autouse=True)
def vllm() -> str:
    """The Python that vLLM is installed for."""
    try:
        return interpreter(Options())
    except RlctlError as error:
        pytest.skip(f"vLLM is not installed: {error.next_step}")


@pytest.fixture(scope="session")
def server(vllm: str, tiny: tuple[Any, Path]) -> Iterator[Driver]:
    """A server of one rank: it takes half a minute to start, so there is one for all modules."""
    driver = Driver(VLLMEngine, tiny[1], options={"allowed_roots": str(tiny[1].parent.parent)})
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def driver(server: Driver) -> Iterator[Driver]:
    """The server, which every test leaves generating, without requests, and alive."""
    yield server
    assert not server.failures
    assert not server.engine._updates.open
    assert not server.engine._state.stopped
    assert not server.engine._requests.active
