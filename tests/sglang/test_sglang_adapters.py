"""LoRA adapters on a real SGLang of two ranks: loaded, switched, unloaded, healed; outputs are the merged model's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import adapter_steps
import pytest
from loras import lora, merged_says, save

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

OPTIONS = {
    "enable_lora": "true",
    "lora_backend": "torch_native",
    "max_lora_rank": "4",
    "lora_target_modules": '["q_proj", "k_proj", "v_proj", "down_proj"]',
    "max_loras_per_batch": "4",
    "max_loaded_loras": "4",
}


@pytest.fixture(scope="module")
def fleet(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = {**OPTIONS, "allowed_roots": str(tmp_path_factory.getbasetemp())}
    spec = EngineSpec("actor", str(tiny[1]), engine="sglang", tp_size=2, options=options)
    with LaunchedFleet([spec], directory=tmp_path_factory.mktemp("fleet")) as up, up.connect() as fleet:
        yield fleet


def test_adapters_are_loaded_switched_and_unloaded(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_loaded_switched_and_unloaded(fleet, tiny[0], tmp_path)


def test_a_trainer_sends_them(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    adapter_steps.are_sent_by_a_trainer(fleet, tiny[0])


def test_a_trainer_sends_more_versions_than_the_server_holds(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    with closing(fleet.publisher("actor", path="ipc", bucket_bytes=4096)) as publisher:
        for number in range(2 + int(OPTIONS["max_loaded_loras"])):
            tensors = lora(tiny[0], number).items()
            publisher.update(tensors, version=f"n-{number}", adapter="sent", adapter_config=adapter_steps.CONFIG)
    fleet.unload_adapter("sent")


def test_what_does_not_fit_changes_nothing(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = lora(tiny[0], 5)
    wide = {name: t.repeat(*((4, 1) if "lora_A" in name else (1, 4))) for name, t in tensors.items()}
    elsewhere = lora(tiny[0], 5, ["gate_proj"])
    alone = lora(tiny[0], 5, ["q_proj"])
    unsupported = (
        save(tmp_path / "wide", wide, r=8),
        save(tmp_path / "root", tensors, use_rslora=True),
        save(tmp_path / "layers", elsewhere, target_modules=["gate_proj"]),
        save(tmp_path / "parts", alone, target_modules=["q_proj"]),
    )
    adapter_steps.are_refused(fleet, tiny[0], tmp_path, [(Reason.UNSUPPORTED, path) for path in unsupported])


def test_none_that_serves_makes_room_for_another(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    path = save(tmp_path / "more", lora(tiny[0], 5))
    for number in range(4):
        fleet.load_adapter(f"more-{number}", path, version="m")
    with pytest.raises(RlctlError) as full:
        fleet.load_adapter("one-too-many", path, version="m")
    assert full.value.reason is Reason.UNSUPPORTED
    assert "--max-loaded-loras" in full.value.message
    for number in range(4):
        fleet.unload_adapter(f"more-{number}")


def test_requests_with_an_adapter_are_ended_only_when_that_is_asked_for(
    fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    adapter_steps.end_requests_only_when_asked_to(fleet, tiny[0], tmp_path, while_paused=False)


def test_the_requests_with_one_adapter_are_paused(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.pause_one_alone(fleet, tiny[0], tmp_path, "actor")


def test_a_base_update_keeps_or_drops_them(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_kept_or_dropped(fleet, tiny[0], tmp_path)


def test_a_killed_server_gets_them_again(fleet: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    tensors = lora(tiny[0], 11)
    tiny[0].save_pretrained(tmp_path / "saved")
    digest = rlctl.model_digest(tiny[0])
    fleet.update_weights_from_disk(str(tmp_path / "saved"), version="on disk", expected_digest=digest)
    fleet.load_adapter("again", save(tmp_path / "again", tensors), version="a")
    adapter_steps.come_back_with(fleet, "actor", "again")
    wanted = merged_says(tiny[0], adapter_steps.PROMPT, tensors)
    assert adapter_steps.generated(fleet, "again") == (wanted, {"a"})
