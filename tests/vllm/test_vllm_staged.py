"""Staged updates of real vLLMs: two ranks that compute with plain parameters, as on GPUs, and one that packs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver, prompt, refusal
from staged_suite import *  # noqa: F403

from rlctl.contract.errors import Reason
from rlctl.demo.tiny import encode
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)

PLAIN = """
def register():
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
"""
"""A plug-in of vLLM's: on a CPU linear layers compute with their parameters, which vLLM would pack."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the plug-in, for PYTHONPATH."""
    place = tmp_path_factory.mktemp("plain")
    information = place / "plain-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nplain = plain:register\n")
    (place / "plain.py").write_text(PLAIN)
    return place


@pytest.fixture(scope="module")
def plain(vllm: str, tiny: tuple[Any, Path], unpacked: Path) -> Iterator[Driver]:
    driver = Driver(VLLMEngine, tiny[1], tp_size=2, options={"allowed_roots": str(tiny[1].parent.parent)})
    try:
        with pytest.MonkeyPatch.context() as patch:
            paths = [str(unpacked), os.environ.get("PYTHONPATH", "")]
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


def test_packed_layers_are_not_staged(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """Requests run on, and an update in place is taken."""
    assert not driver.info.capabilities.staged_apply
    running = driver.begin(prompt(encode("7"), 100)).started()
    error = refusal(driver, v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED), update_id="packed")
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "apply")
    assert "packed" in error.message
    assert running.result()[-1].samples[0].finish_reason.type
