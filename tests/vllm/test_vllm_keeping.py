"""A real vLLM that stores KV entries beside its prefix cache: the cache salt keeps entries of earlier weights unread.

The store is vLLM's in host memory; on a CPU its copies are those of host_store_in_vllm.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loras import lora, merged_says, save
from models import changed, greedy
from native_stand_in import plug_in
from rlctl_vllm.engine import VLLMEngine
from rlctl_vllm.requests import requests
from server_stage import Driver, Segments, prompt, refusal

from rlctl.contract.errors import Reason
from rlctl.demo.tiny import encode
from rlctl.engine import Call
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(400)

TEXT = "12+34=" * 17
IDS = encode(TEXT)
STORE = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}


@pytest.fixture(scope="module")
def storing(vllm: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    place = tmp_path_factory.mktemp("store") / "plug-in"
    options = {
        "load_format": "dummy",
        "kv_transfer_config": json.dumps(STORE),
        "enable_lora": "true",
        "max_lora_rank": "8",
        "allowed_roots": str(tmp_path_factory.getbasetemp()),
    }
    driver = Driver(VLLMEngine, tiny[1], options=options)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(plug_in(place, "host_store_in_vllm")), prepend=os.pathsep)
            driver.start()
        yield driver
    finally:
        driver.stop()


@pytest.fixture
def driver(storing: Driver) -> Iterator[Driver]:
    yield storing
    assert not storing.failures


def flush_without_the_store(driver: Driver) -> None:
    """As a flush that does not reach the store, or fails there."""

    async def flush() -> None:
        call = Call("flush", asyncio.get_running_loop().time() + 60)
        assert (await driver.engine._control.tell("/reset_prefix_cache", {}, call=call)).ok

    driver.admin.submit(flush()).result(60)


def generated(driver: Driver, **fields: Any) -> tuple[list[int], int]:
    """Greedy tokens after a prompt of several blocks, and how many tokens of the prompt were read from entries."""
    generating = driver.begin(prompt(IDS, 8, **fields))
    cached = generating.result()[-1].samples[0].cached_tokens
    return generating.tokens, cached


def update(driver: Driver, model: Any, sequence: int) -> None:
    """New weights under the label of the ones before. Nothing is flushed."""
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
    driver.tell(v.PrepareUpdateRequest(), update_id=f"u{sequence}")
    with Segments(driver) as segments:
        segments.send(model, f"u{sequence}")
    driver.commit(f"u{sequence}", "same", sequence)
    driver.tell(v.ContinueGenerationRequest())


def test_weights_that_are_made_up_are_no_version(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """As trainers start it that send the first weights themselves. vLLM would read no checkpoint from disk either."""
    info = driver.info
    assert (info.checkpoint, info.model_digest) == ("", "")
    assert "load-format dummy" in info.capabilities.unsupported["UpdateWeightsFromDisk"]
    driver.tell(v.PauseGenerationRequest())
    driver.tell(v.PrepareUpdateRequest(), update_id="first")
    from_disk = v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1]))
    assert refusal(driver, from_disk, update_id="first").reason is Reason.UNSUPPORTED
    driver.tell(v.AbortUpdateRequest(), update_id="first")
    driver.tell(v.ContinueGenerationRequest())
    update(driver, tiny[0], 10)
    assert generated(driver) == (greedy(tiny[0], IDS, 8), 0)


def test_no_entry_of_earlier_weights_is_read_though_nothing_was_flushed(
    driver: Driver, tiny: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"UpdateWeightsFromTensor", "UpdateWeightsFromDistributed", "LoadAdapter"}
    assert not written & driver.info.capabilities.unsupported.keys()
    models = [changed(tiny[0], seed=seed, scale=0.3) for seed in range(3)]
    update(driver, models[0], 11)
    before = greedy(models[0], IDS, 8)
    assert generated(driver) == (before, 0)
    flush_without_the_store(driver)
    tokens, cached = generated(driver)
    assert tokens == before
    assert cached > 0, "the store outlives the flush"

    update(driver, models[1], 12)
    flush_without_the_store(driver)
    after = greedy(models[1], IDS, 8)
    assert generated(driver) == (after, 0)

    # Without the salt the entries of the weights before are read, and the tokens are of neither weights.
    monkeypatch.setattr(requests, "with_own", lambda *_: "salt")
    assert generated(driver) == (after, 0)
    update(driver, models[2], 13)
    flush_without_the_store(driver)
    tokens, cached = generated(driver)
    assert cached > 0
    assert tokens != greedy(models[2], IDS, 8)
    # A flush of rlctl's reaches the store.
    driver.tell(v.FlushCacheRequest())
    assert generated(driver) == (greedy(models[2], IDS, 8), 0)


def test_no_entry_of_an_earlier_version_of_an_adapter_is_read(
    driver: Driver, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    model = changed(tiny[0], seed=3)
    update(driver, model, 14)
    for number in (1, 2):
        tensors, name = lora(tiny[0], number), f"a{number}"
        path = save(tmp_path / name, tensors)
        adapter = v.Adapter(name="policy", version=name, path=path)
        driver.tell(v.PrepareUpdateRequest(kind=v.UPDATE_KIND_ADAPTER, adapter=adapter), update_id=name)
        driver.tell(v.LoadAdapterRequest(name="policy", path=path, version=name), update_id=name)
        driver.tell(v.CommitUpdateRequest(), update_id=name)
        says = merged_says(model, TEXT, tensors)
        assert generated(driver, adapter="policy") == (says, 0)
        flush_without_the_store(driver)
        tokens, cached = generated(driver, adapter="policy")
        assert tokens == says
        assert cached > 0
    driver.tell(v.UnloadAdapterRequest(name="policy"))
