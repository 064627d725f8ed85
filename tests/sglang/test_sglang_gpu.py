"""A real SGLang on a GPU, launched and attached to: updates by every path. `tools/gpu` runs it. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_sglang import own_sglang
from path_suite import *  # noqa: F403
from path_suite import NO_GPU, Served, in_bfloat16

import rlctl
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), NO_GPU]

ARGUMENTS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "cuda_graph_max_bs_decode": "4",
    "mem_fraction_static": "0.2",
    "max_total_tokens": "16384",
}
"""Captured graphs keep the addresses of weights. The static memory leaves room for a shadow copy and other tests."""


@pytest.fixture(scope="module", params=["launched", "attached"])
def served(
    request: pytest.FixtureRequest,
    sglang: str,
    spawning: dict[str, str],
    tiny: tuple[Any, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """A server with a rank on each GPU but the last one, at most two, or with one rank."""
    ranks = 2 if torch.cuda.device_count() > 2 else 1
    model, checkpoint = in_bfloat16(tiny[0], tmp_path_factory.mktemp("bfloat16") / "checkpoint")
    roots = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in spawning.items():
            patch.setenv(name, value)
        if request.param == "launched":
            spec = EngineSpec(
                "actor-0", str(checkpoint), engine="sglang", tp_size=ranks, device="cuda", options=ARGUMENTS | roots
            )
            with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
                yield Served(fleet, model, ranks, "cuda")
            return
        keys = tmp_path_factory.mktemp("keys")
        with (
            own_sglang(checkpoint, keys, ranks, device="cuda", dtype="bfloat16", arguments=ARGUMENTS) as (url, options),
            rlctl.embedded([url], options=options | roots) as fleet,
        ):
            yield Served(fleet, model, ranks, "cuda")
