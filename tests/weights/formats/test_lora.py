"""PEFT's adapter configs: what is understood, and what is refused because it would be computed wrongly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlctl.contract.adapter_identity import scale_of
from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.formats import lora

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]


def refused(**changes: Any) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        lora.from_peft({**PLAIN, **changes}, field="adapter_config")
    assert caught.value.field.startswith("adapter_config")
    return caught.value


def test_what_a_config_says() -> None:
    config = lora.from_peft({**PLAIN, "lora_dropout": 0.5, "use_dora": False, "rank_pattern": {}}, field="path")
    assert (config.lora_rank, config.lora_alpha, list(config.target_modules)) == (4, 8, ["q_proj", "v_proj"])
    assert scale_of(config) == 2
    rslora = lora.from_peft({**PLAIN, "use_rslora": True}, field="path")
    assert scale_of(rslora) == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"use_dora": True}, Reason.UNSUPPORTED, "use_dora"),
        ({"alpha_pattern": {"q_proj": 1}}, Reason.UNSUPPORTED, "alpha_pattern"),
        ({"layers_to_transform": [1]}, Reason.UNSUPPORTED, "layers_to_transform"),
        ({"some_feature_of_the_future": True}, Reason.UNSUPPORTED, "some_feature_of_the_future"),
        ({"peft_type": "ADALORA"}, Reason.UNSUPPORTED, "ADALORA"),
        ({"peft_type": "\ud800"}, Reason.UNSUPPORTED, r"a \ud800 adapter"),
        ({"bias": "lora_only"}, Reason.UNSUPPORTED, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, Reason.UNSUPPORTED, "pissa"),
        ({"target_modules": "all-linear"}, Reason.UNSUPPORTED, "all-linear"),
        ({"target_modules": None}, Reason.FIELD_INVALID, "target_modules"),
        ({"target_modules": []}, Reason.FIELD_INVALID, "target_modules"),
        ({"target_modules": [1]}, Reason.FIELD_INVALID, "target_modules"),
        ({"r": 2.5}, Reason.FIELD_INVALID, "r is 2.5"),
        ({"r": True}, Reason.FIELD_INVALID, "r is True"),
        ({"r": -1}, Reason.FIELD_INVALID, "r is -1"),
        ({"lora_alpha": "8"}, Reason.FIELD_INVALID, "lora_alpha"),
        ({"lora_alpha": float("nan")}, Reason.FIELD_INVALID, "nan"),
        ({"lora_alpha": 10**400}, Reason.FIELD_INVALID, "too large"),
        ({"target_modules": ["\ud800"]}, Reason.FIELD_INVALID, "surrogates"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], reason: Reason, named: str) -> None:
    error = refused(**changes)
    assert error.reason is reason
    assert named in error.message


def test_targets_are_last_words_or_whole_names() -> None:
    def found(*targets: str) -> list[str]:
        config = lora.from_peft({**PLAIN, "target_modules": targets}, field="path")
        return lora.targets(config, MODULES, field="path")

    assert found("q_proj") == sorted(MODULES[:2])
    assert found(MODULES[0]) == [MODULES[0]]
    assert found("self_attn.v_proj", "q_proj") == sorted(MODULES)
    with pytest.raises(RlctlError) as caught:
        found("q_proj", "proj")
    assert caught.value.reason is Reason.CHECKPOINT_MISMATCH
    assert "'proj'" in caught.value.message


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RlctlError) as caught:
        lora.open_adapter(str(tmp_path / "nowhere"))
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_NOT_FOUND, "path")
    (tmp_path / lora.CONFIG).write_text(json.dumps(PLAIN))
    with pytest.raises(RlctlError) as caught:
        lora.open_adapter(str(tmp_path))
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    tensors = {name: torch.ones(4, 4) for name in lora.names_of(MODULES[0])}
    save_file(tensors, tmp_path / lora.TENSORS)
    config, stored = lora.open_adapter(str(tmp_path))
    assert config.lora_rank == 4
    assert dict(stored.metas) == {m.name: m for m in lora.metas_of(MODULES[0], 4, 4, 4, torch.float32)}
    stored.close()
    (tmp_path / lora.CONFIG).write_text("[]")
    with pytest.raises(RlctlError) as caught:
        lora.open_adapter(str(tmp_path))
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND


def test_an_adapter_that_is_replaced_between_its_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new matrices with the scale of the old ones would compute other values than either version."""
    (tmp_path / "new").mkdir()
    for directory, alpha in ((tmp_path, 8), (tmp_path / "new", 16)):
        (directory / lora.CONFIG).write_text(json.dumps({**PLAIN, "lora_alpha": alpha}))
        save_file({name: torch.full((4, 4), alpha) for name in lora.names_of(MODULES[0])}, directory / lora.TENSORS)
    opens = lora.open_files

    def late(path: str, **options: Any) -> Any:
        for name in (lora.CONFIG, lora.TENSORS):
            (tmp_path / "new" / name).replace(tmp_path / name)
        return opens(path, **options)

    monkeypatch.setattr(lora, "open_files", late)
    with pytest.raises(RlctlError, match="was changed while it was read") as caught:
        lora.open_adapter(str(tmp_path))
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_NOT_FOUND, "path")
    monkeypatch.setattr(lora, "open_files", opens)
    config, stored = lora.open_adapter(str(tmp_path))
    assert config.lora_alpha == 16
    stored.close()


@pytest.mark.parametrize("further", ["model.safetensors", "model.safetensors.index.json", "more.safetensors"])
def test_a_directory_with_further_safetensors_files_is_a_mismatch(tmp_path: Path, further: str) -> None:
    (tmp_path / lora.CONFIG).write_text(json.dumps(PLAIN))
    save_file({"a": torch.ones(1)}, tmp_path / lora.TENSORS)
    save_file({"a": torch.ones(1)}, tmp_path / further)
    with pytest.raises(RlctlError, match=further) as caught:
        lora.open_adapter(str(tmp_path))
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_MISMATCH, "path")


def test_an_adapter_of_several_files_is_a_mismatch(tmp_path: Path) -> None:
    (tmp_path / lora.CONFIG).write_text(json.dumps(PLAIN))
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model-1.safetensors")
    (tmp_path / "adapter_model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "adapter_model-1.safetensors"}})
    )
    with pytest.raises(RlctlError, match="an adapter is one file") as caught:
        lora.open_adapter(str(tmp_path))
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKPOINT_MISMATCH, "path")
