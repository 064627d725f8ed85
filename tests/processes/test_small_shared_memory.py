"""A trainer and engines in a container with docker's default of 64 MB in /dev/shm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import elsewhere
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from rlctl.demo.tiny import save

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

DOCKERS = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")

TRAINER = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
import rlctl
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

def update(fleet, model, path, weights):
    before = len(fleet.operations(page_size=500))
    with fleet.publisher(model, path=path) as publisher:
        results = [publisher.update(weights, version=f"{path}-{number}") for number in range(2)]
    verbs = [each.verb for each in fleet.operations(page_size=500)[: -before or None]]
    return {
        "digest": results[-1].model_digest == rlctl.model_digest(weights, like=results[-1].model_digest),
        "group": "InitWeightsUpdateGroup" in verbs,
        "segments": verbs.count("UpdateWeightsFromTensor"),
    }

def refused(fleet, model, path, weights):
    with fleet.publisher(model, path=path) as publisher:
        try:
            publisher.update(weights, version="refused")
        except rlctl.RlctlError as error:
            return {"reason": error.reason.name, "field": error.field, "open": fleet.status().models[0].update_id}

checkpoints = json.loads(sys.argv[1])
engines = [EngineSpec(f"{name}-0", path, model=name, engine="torch") for name, path in checkpoints.items()]
models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in checkpoints.items()}
with LaunchedFleet(engines, directory=Path(sys.argv[2])) as launched, launched.connect() as fleet:
    print(json.dumps({
        "many auto": update(fleet, "many", "auto", models["many"]),
        "many ipc": update(fleet, "many", "ipc", models["many"]),
        "wide auto": update(fleet, "wide", "auto", models["wide"]),
        "huge ipc": refused(fleet, "huge", "ipc", models["huge"]),
        "huge auto": update(fleet, "huge", "auto", models["huge"]),
    }))
"""


def checkpoint(place: Path, **sizes: int) -> str:
    settings = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(**settings | sizes, tie_word_embeddings=False, max_position_embeddings=64, dtype="float32")
    model: Any = LlamaForCausalLM(config)
    save(model.float(), place)
    return str(place)


def test_weights_go_through_little_shared_memory_in_small_segments_or_over_a_group(tmp_path: Path) -> None:
    elsewhere.need(*DOCKERS, "true")
    checkpoints = {
        "many": checkpoint(tmp_path / "many", vocab_size=64, num_hidden_layers=8),  # 80 MB of small tensors
        "wide": checkpoint(tmp_path / "wide", vocab_size=10240, num_hidden_layers=1),  # tensors of 20 MB
        "huge": checkpoint(tmp_path / "huge", vocab_size=34000, num_hidden_layers=1),  # tensors of 66 MB
    }
    trainer = [sys.executable, "-c", TRAINER, json.dumps(checkpoints), str(tmp_path)]
    done = subprocess.run([*DOCKERS, *trainer], stdout=subprocess.PIPE, check=True, text=True, timeout=220)
    told = json.loads(done.stdout.splitlines()[-1])
    for name in ("many auto", "many ipc"):
        assert told[name]["digest"]
        assert not told[name]["group"], "it came through shared memory"
        assert told[name]["segments"] > 2, "in segments that fit"
    for name in ("wide auto", "huge auto"):
        assert told[name] == {"digest": True, "group": True, "segments": 0}, "it was broadcast"
    assert told["huge ipc"] == {"reason": "SHARED_MEMORY_FULL", "field": "path", "open": ""}
