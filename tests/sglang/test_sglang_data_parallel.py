"""A real SGLang with DP attention: each of its two ranks has requests of its own.

On a CPU, SGLang 0.5.23 ends at the first request.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.v1.common_pb2 import STAGE_STATE_READY

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_a_stage_with_dp_attention_starts_and_refuses_what_one_rank_would_answer(
    sglang: str, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    options = {"attn_dp_size": "2", "enable_memory_saver": "true"}
    spec = EngineSpec("dp", str(tiny[1]), engine="sglang", tp_size=2, options=options)
    with LaunchedFleet([spec], directory=tmp_path / "fleet") as up, up.connect() as fleet:
        assert fleet.status().stages[0].state == STAGE_STATE_READY
        update = partial(fleet.update_weights_from_disk, str(tiny[1]), version="next")
        for refused in (fleet.flush_cache, fleet.release_memory, fleet.check_weights, update):
            with pytest.raises(RlctlError) as failed:
                refused()
            assert failed.value.reason in (Reason.UNSUPPORTED, Reason.UNSUPPORTED_BY_ALL)
        fleet.pause_generation("retract")
        fleet.continue_generation()
        assert fleet.status().stages[0].state == STAGE_STATE_READY
