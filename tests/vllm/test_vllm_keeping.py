"""A real vLLM that stores KV entries beside its prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import greedy
from rlctl_servers.server.server_info import WRITES
from rlctl_vllm.engine import VLLMEngine
from server_stage import Driver, prompt, refusal

from rlctl.contract.errors import Reason
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)


def test_a_store_of_kv_entries_that_no_flush_empties_rules_out_updates(
    vllm: str, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    store = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    driver = Driver(VLLMEngine, tiny[1], options={"kv_transfer_config": json.dumps(store)})
    try:
        info = driver.start()
        assert info.checkpoint == str(tiny[1])
        for verb in WRITES:
            assert info.capabilities.unsupported[verb].startswith("kv_transfer_config keeps KV entries")
        ids = [5 + index % 9 for index in range(100)]
        cached = []
        for _ in range(2):
            generating = driver.begin(prompt(ids, 4))
            cached.append(generating.result()[-1].samples[0].cached_tokens)
            assert generating.tokens == greedy(tiny[0], ids, 4)
            driver.tell(v.FlushCacheRequest())
        assert cached[0] == 0
        assert cached[1] > 0, "the store outlives a flush"
        driver.prepare("u")
        error = refusal(driver, v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="u")
        assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
        assert "kv_transfer_config" in error.message
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        driver.tell(v.ContinueGenerationRequest())
        assert not driver.failures
    finally:
        driver.stop()
