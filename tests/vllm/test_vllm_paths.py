"""Real vLLM servers of one rank and of two, launched and attached to: updates by every path.

The attached ranks of two compute with plain parameters, as on GPUs, and stage updates. The launched server of two ranks
is that of test_vllm_parallel.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from native_stand_in import plug_in
from path_suite import *  # noqa: F403
from path_suite import Served
from plain_server import OnPort, serving

import rlctl
from rlctl.engine import EngineConfig
from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["launched, 1 rank", "attached, 1 rank", "attached, 2 ranks"])
def served(
    request: pytest.FixtureRequest, vllm: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    how, ranks = request.param.split(", ")
    ranks = int(ranks[0])
    if how == "launched":
        solo: LaunchedFleet = request.getfixturevalue("solo")
        with solo.connect() as fleet:
            yield Served(fleet, tiny[0], ranks, stages=False)  # packed layers
        return
    with pytest.MonkeyPatch.context() as patch:
        if ranks == 2:
            place = plug_in(tmp_path_factory.mktemp("plain") / "plug-in", "plain_kernels")
            patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        server = OnPort(EngineConfig(str(tiny[1]), tp_size=ranks, dtype="float32"))
        roots = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
        with serving(server) as url, rlctl.embedded([url], options=roots) as fleet:
            yield Served(fleet, tiny[0], ranks, stages=ranks == 2)
