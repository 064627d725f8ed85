"""LoRA adapters on a real SGLang of two ranks: loaded, switched, unloaded, healed; outputs are the merged model's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import adapter_steps
import pytest
from loras import lora, save
from models import changed

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_adapters_are_loaded_switched_and_unloaded(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_loaded_switched_and_unloaded(pair, tiny[0], tmp_path)


def test_a_trainer_sends_them(pair: Fleet, tiny: tuple[Any, Path]) -> None:
    adapter_steps.are_sent_by_a_trainer(pair, tiny[0])


def test_a_trainer_sends_more_versions_than_the_server_holds(pair: Fleet, tiny: tuple[Any, Path]) -> None:
    with closing(pair.publisher("actor", path="ipc", bucket_bytes=4096)) as publisher:
        for number in range(6):
            tensors = lora(tiny[0], number).items()
            publisher.update(tensors, version=f"n-{number}", adapter="sent", adapter_config=adapter_steps.CONFIG)
    pair.unload_adapter("sent")


def test_what_does_not_fit_changes_nothing(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
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
    adapter_steps.are_refused(pair, tiny[0], tmp_path, [(Reason.UNSUPPORTED, path) for path in unsupported])


def test_an_adapter_is_loaded_at_every_rank_before_its_files_are_removed(
    pair: Fleet, tiny: tuple[Any, Path], ordered: Path
) -> None:
    """SGLang answers a load once rank 0 has loaded the adapter."""
    ordered.write_text("late-adapter:@1")
    adapter_steps.are_sent_by_a_trainer(pair, tiny[0])


def test_an_adapter_that_a_rank_has_not_loaded_is_refused(
    pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path, ordered: Path
) -> None:
    """SGLang reports success, and the rank without the adapter would end the server at the next request with it."""
    path = save(tmp_path / "partial", lora(tiny[0], 5))
    ordered.write_text("no-adapter:@1")
    with pytest.raises(RlctlError) as refused:
        pair.load_adapter("partial", path, version="1")
    assert refused.value.reason is Reason.ENGINE_FAILED
    assert "not at rank 1" in refused.value.message
    assert adapter_steps.listed(pair) == set()
    ordered.unlink()
    pair.load_adapter("partial", path, version="1")
    assert adapter_steps.generated(pair, "partial")[1] == {"1"}
    assert [stage.incarnation for stage in pair.status().stages] == [1], "SGLang was not started again"
    pair.unload_adapter("partial")


def test_none_that_serves_makes_room_for_another(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    path = save(tmp_path / "more", lora(tiny[0], 5))
    for number in range(4):
        pair.load_adapter(f"more-{number}", path, version="m")
    with pytest.raises(RlctlError) as full:
        pair.load_adapter("one-too-many", path, version="m")
    assert full.value.reason is Reason.UNSUPPORTED
    assert "--max-loaded-loras" in full.value.message
    for number in range(4):
        pair.unload_adapter(f"more-{number}")


def test_requests_with_an_adapter_are_ended_only_when_that_is_asked_for(
    pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    adapter_steps.end_requests_only_when_asked_to(pair, tiny[0], tmp_path, while_paused=False)


def test_the_requests_with_one_adapter_are_paused(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.pause_one_alone(pair, tiny[0], tmp_path, "pair")


@pytest.mark.long
def test_a_killed_server_gets_adapters_their_pause_and_its_version_again(
    pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """The stage server starts it again, and the coordinator heals it from the checkpoint, without the trainer."""
    model = changed(tiny[0], seed=4)
    model.save_pretrained(tmp_path / "saved")
    digest = rlctl.model_digest(model)
    updated = pair.update_weights_from_disk(str(tmp_path / "saved"), version="on disk", expected_digest=digest)
    adapter_steps.pause_one_alone(pair, model, tmp_path, "pair", killed=True)
    (stage,) = pair.status().stages
    assert stage.report.weight_version == updated.weight_version
    assert stage.report.model_digest == digest


def test_a_base_update_keeps_or_drops_them(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    adapter_steps.are_kept_or_dropped(pair, tiny[0], tmp_path)
