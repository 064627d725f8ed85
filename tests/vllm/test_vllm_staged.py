"""The suite of staged updates on a real vLLM of two ranks that compute with plain parameters, as on GPUs.

Shorter: test_vllm_parallel.py, whose ranks take staged updates on every path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_stand_in import plug_in
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver
from staged_suite import *  # noqa: F403

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


@pytest.fixture(scope="module")
def plain(vllm: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    place = plug_in(tmp_path_factory.mktemp("plain") / "plug-in", "plain_kernels")
    driver = Driver(VLLMEngine, tiny[1], tp_size=2, options={"allowed_roots": str(tiny[1].parent.parent)})
    try:
        with pytest.MonkeyPatch.context() as patch:
            paths = [str(place), os.environ.get("PYTHONPATH", "")]
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
            driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def staging(plain: Driver) -> Iterator[Driver]:
    """The server, which every test leaves generating and alive."""
    yield plain
    assert not plain.failures
    assert not plain.engine._updates.open
    assert not plain.engine._state.stopped
