"""The settings of an engine on vLLM, in a topology file and for a launcher, and checks of the engine."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from models import changed, greedy

from rlctl.demo.tiny import encode
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import verbs_pb2 as v

NAME = "on-vllm"
START_S = 500.0
OVERRIDES: dict[str, Any] = {"max-model-len": 500, "max_num_seqs": 7, "enable_lora": True, "max_lora_rank": 8}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2"}


def options(**more: str) -> dict[str, str]:
    """Return the settings as a launcher's options. ``more``: further arguments of vLLM."""
    return {name.replace("-", "_"): str(value).lower() for name, value in OVERRIDES.items()} | more


def written(directory: Path, checkpoint: Path, **overrides: Any) -> str:
    """Write the file; return its path. ``overrides``: further arguments of vLLM."""
    group = {
        "worker_type": "regular",
        "num_gpus": 1,
        "overrides": {**OVERRIDES, **overrides},
        "environment": ENVIRONMENT,
    }
    models = [{"name": "actor", "engine": "vllm", "server_groups": [group]}]
    fleet = {"name": NAME, "hf_checkpoint": str(checkpoint), "listen": "127.0.0.1:0"}
    file = directory / "vllm.yaml"
    file.write_text(json.dumps({"fleet": fleet, "models": models}))
    return str(file)


def check_is_as_written(fleet: Fleet, model: Any) -> int:
    """Check that settings, environment and weights reach vLLM; return vLLM's process id."""
    (rank,) = fleet.call(v.GetServerInfoRequest(), model="actor").stage_results[0].rank_results
    info = rank.server_info
    assert info.engine == "vllm"
    assert info.settings["model_config.max_model_len"] == "500"
    assert info.settings["scheduler_config.max_num_seqs"] == "7"
    assert psutil.Process(info.pid).environ()["VLLM_CPU_KVCACHE_SPACE"] == "2"
    updated = changed(model, seed=5)
    with closing(fleet.publisher("actor")) as publisher:
        for weights, version in ((updated, "new"), (model, "as it was")):
            publisher.update(weights, version=version)
            response = fleet.generate(encode("1+2="), model="actor", max_new_tokens=8, temperature=0.0, ignore_eos=True)
            (sample,) = response.samples
            assert list(sample.output_ids) == greedy(weights, encode("1+2="), 8)
            assert {span.version.label for span in sample.versions} == {version}
    return int(info.pid)
