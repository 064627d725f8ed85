"""A prefill and a decode server of real SGLang from a file; KV entries go from one to the other by NIXL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapter_steps
import grpc
import pytest
from loras import lora, merged_says, save
from models import greedy
from paired import PROMPT, SAMPLING, killed_meanwhile, over_http, updated_meanwhile
from up_helpers import known, own_state, rlctl_command

from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.rollout.prefill_decode import halves
from rlctl.rollout.requests import build_request
from rlctl.sdk.blocking import Fleet, connect
from rlctl.trainer.publisher import rolling
from rlctl.transport.status import from_grpc
from rlctl.v1.common_pb2 import PAUSE_MODE_IN_PLACE, WORKER_TYPE_DECODE, WORKER_TYPE_PREFILL
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from rlctl.v1.verbs_pb2 import PauseGenerationRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NAME = "sglang-pairs"

FILE = """
fleet:
  name: sglang-pairs
  hf_checkpoint: {checkpoint}
  engine: sglang
  gateways: 127.0.0.1
  restart: {{backoff_s: 0.1}}

models:
  - name: actor
    overrides:
      enable_lora: true
      lora_backend: torch_native
      max_lora_rank: 4
      lora_target_modules: [q_proj, k_proj, v_proj, down_proj]
      allowed_roots: {roots}
    server_groups:
      - worker_type: prefill
        num_gpus: 1
        environment: {{UCX_NET_DEVICES: lo}}
      - worker_type: decode
        num_gpus: 1
        environment: {{UCX_NET_DEVICES: lo}}
"""


@pytest.fixture(scope="module")
def pair(tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Both servers and a gateway, of a fleet that is up."""
    directory = tmp_path_factory.mktemp("pair")
    file = directory / "pairs.yaml"
    file.write_text(FILE.format(checkpoint=tiny[1], roots=tmp_path_factory.getbasetemp()))
    with pytest.MonkeyPatch.context() as patch, own_state(patch, directory):
        up = rlctl_command("up", str(file), "--detach", "--listen", "127.0.0.1:0", "-o", "json", timeout_s=300)
        assert up.returncode == 0, up.stderr
        with connect(json.loads(up.stdout)["endpoint"]) as fleet:
            yield fleet
        assert rlctl_command("down", "--name", NAME).returncode == 0


def test_adapters_are_switched_for_both(pair: Fleet, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    """Before the updates below: the outputs are those of the first weights."""
    rollout = pair.rollout("actor")
    prompt = adapter_steps.PROMPT
    for version, seed in (("1", 1), ("2", 2)):
        tensors = lora(tiny[0], seed)
        pair.load_adapter("math", save(tmp_path / version, tensors), version=version)
        [sample] = rollout.generate(encode(prompt), max_new_tokens=8, adapter="math", **SAMPLING)
        assert sample.output_ids == merged_says(tiny[0], prompt, tensors)
    pair.unload_adapter("math")


def test_they_generate_and_are_updated(pair: Fleet, tiny: tuple[Any, Path]) -> None:
    rollout = pair.rollout("actor")
    [sample] = rollout.generate(PROMPT, max_new_tokens=8, **SAMPLING)
    assert sample.output_ids == greedy(tiny[0], PROMPT, 8)
    assert over_http(known(NAME).gateways["actor"], max_new_tokens=8) == sample.output_ids
    with pytest.raises(RlctlError, match="has no pause mode in_place; it has: abort, retract"):
        pair.call(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
    updated_meanwhile(pair, rollout, tiny[0], {"pause": "retract"}, {"pause": "abort", "rollout": rolling()})


def test_a_half_that_comes_late_is_computed_at_the_version_of_its_pair_or_not_at_all(pair: Fleet) -> None:
    """SGLang itself would have the other half take whatever comes."""
    stages = {stage.registration.worker_type: stage for stage in pair.status().stages}
    prefill, decode = stages[WORKER_TYPE_PREFILL], stages[WORKER_TYPE_DECODE]
    request = halves(build_request(PROMPT, {"max_new_tokens": 4, **SAMPLING}), prefill, decode)
    request.bootstrap_version_seq -= 1
    for stage in (prefill, decode):
        with grpc.insecure_channel(stage.registration.rollout_address) as channel, pytest.raises(grpc.RpcError) as told:
            RolloutServiceStub(channel).Generate(request, timeout=10)
        error = from_grpc(told.value)
        assert (error.reason, error.field) == (Reason.STAGE_NOT_SERVING, "bootstrap_version_seq")


@pytest.mark.long
@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_samples_outlive_either(pair: Fleet, half: str) -> None:
    killed_meanwhile(pair, pair.rollout("actor"), f"actor-{half}-0", NAME)
