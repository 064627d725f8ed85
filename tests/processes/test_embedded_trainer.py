"""A trainer with a coordinator of its own that is started again: its engines are as it left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import changed, greedy

import rlctl
from rlctl.demo.tiny import encode
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.local.child_processes import stop_all
from rlctl.launch.local.launcher import LocalLauncher

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_a_trainer_that_has_lost_its_journal_goes_on_from_the_version_that_is_served(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    stage = LocalLauncher(tmp_path / "logs", module="rlctl").launch(EngineSpec("actor-0", str(tiny[1])), 0, "")
    try:
        address = stage.announced(60)["address"]
        latest = "initial"
        for number in (1, 2, 3):
            with rlctl.embedded([address]) as fleet:
                assert fleet.status().models[0].latest.label == latest
                assert fleet.status().stages[0].routable
                model, latest = changed(tiny[0], seed=number), f"run-{number}"
                # Its groups stand at the engine when it is gone.
                fleet.publisher("actor", path="broadcast").update(model, version=latest)
                (sample,) = fleet.generate(encode("4"), max_new_tokens=8, temperature=0, ignore_eos=True).samples
                assert list(sample.output_ids) == greedy(model, encode("4"), 8)
    finally:
        stop_all([stage])
