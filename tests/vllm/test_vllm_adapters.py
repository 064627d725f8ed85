"""A real vLLM with settings of its own: LoRA adapters, with room for one at a time, and co-located trainers.

Outputs with an adapter are the merged model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_steps
import pytest
from colocated import assert_updates
from loras import CONFIG, lora, merged_says, save
from vllm_file import check_is_as_written

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fleet(solo: LaunchedFleet) -> Iterator[Fleet]:
    with solo.connect() as fleet:
        yield fleet


def test_the_first_version_is_the_checkpoint(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    (model,) = fleet.status().models
    assert model.latest.sequence == 1
    assert model.model_digest == rlctl.model_digest(tiny[0])


def test_what_the_settings_say_reaches_vllm(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    check_is_as_written(fleet, tiny[0])


def test_adapters_are_loaded_switched_and_unloaded(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_loaded_switched_and_unloaded(fleet, tiny[0], tmp_path)


def test_any_layers_and_pefts_other_scale(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = lora(tiny[0], 5, ["q_proj", "gate_proj"])
    path = save(tmp_path / "root", tensors, target_modules=["q_proj", "gate_proj"], use_rslora=True, bias=None)
    fleet.load_adapter("root", path, version="r")
    # The product is scaled by alpha over the rank's root: as if one matrix were larger by the root.
    larger = {name: t * math.sqrt(CONFIG["r"]) if ".lora_A." in name else t for name, t in tensors.items()}
    assert adapter_steps.generated(fleet, "root") == (merged_says(tiny[0], adapter_steps.PROMPT, larger), {"r"})
    fleet.unload_adapter("root")


def test_a_trainer_sends_them(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    adapter_steps.are_sent_by_a_trainer(fleet, tiny[0])


def test_what_does_not_fit_changes_nothing(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = lora(tiny[0], 5)
    wide = {name: t.repeat(*((8, 1) if "lora_A" in name else (1, 8))) for name, t in tensors.items()}
    unsupported = (save(tmp_path / "wide", wide, r=16), save(tmp_path / "dora", tensors, use_dora=True))
    adapter_steps.are_refused(fleet, tiny[0], tmp_path, [(Reason.UNSUPPORTED, path) for path in unsupported])
    with pytest.raises(RlctlError) as pinned:
        fleet.load_adapter("pinned", save(tmp_path / "plain", tensors), version="p", pinned=True)
    assert (pinned.value.reason, pinned.value.field) == (Reason.UNSUPPORTED, "pinned")
    assert adapter_steps.listed(fleet) == set()


def test_requests_with_an_adapter_are_ended_only_when_that_is_asked_for(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    adapter_steps.end_requests_only_when_asked_to(fleet, tiny[0], tmp_path, while_paused=True)


def test_the_requests_with_one_adapter_are_paused(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.pause_one_alone(fleet, tiny[0], tmp_path, "actor-0")


def test_a_base_update_keeps_or_drops_them(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_kept_or_dropped(fleet, tiny[0], tmp_path)


@pytest.mark.parametrize("trainer", ["slime", "miles"])
async def test_the_ranks_have_a_co_located_trainers_weights(
    solo: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    """rlctl's code in the rank reads the handles of the trainer."""
    await assert_updates(solo.address, tiny[1], tmp_path, trainer)
