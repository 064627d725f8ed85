"""What the data port reads of SGLang's bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rlctl_servers.adapters.lora_table import Held
from rlctl_servers.requests.passed_bodies import overridden
from rlctl_sglang import SGLangEngine
from rlctl_sglang.requests.bodies import Limits
from rlctl_sglang.requests.passing import Reader

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig, HttpRequest
from rlctl.v1.verbs_pb2 import Adapter

READER = Reader(Limits(100, 512, 500), "base")
SCHEMA = {"json_schema": "{}"}


def read(path: str, document: dict[str, Any]) -> Any:
    return READER.read(HttpRequest("POST", path, (), json.dumps(document).encode(), document))


@pytest.mark.parametrize(
    ("path", "document", "field"),
    [
        ("/v1/score", {"query": [1], "items": [[100]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": [100], "items": [[1]]}, "query"),
        ("/v1/chat/completions", {"input_ids": ["99"]}, "input_ids"),
        ("/v1/completions", {"stop_token_ids": ["999"], "min_tokens": 5}, "stop_token_ids"),
        ("/generate", {"multi_item_delimiter_indices": [999]}, "multi_item_delimiter_indices"),
        ("/v1/score", {"query_embed_overrides": [[1.0]]}, "query_embed_overrides"),
        ("/generate", {"sampling_params": {"repetition_penalty": 1e-300}}, "sampling_params.repetition_penalty"),
        ("/generate", {"sampling_params": {"logit_bias": {"1": 1e308}}}, "sampling_params.logit_bias"),
        ("/generate", {"sampling_params": [{"n": -3}]}, "n"),
        ("/generate", {"sampling_params": {"n": "3"}}, "n"),
        ("/generate", {"lora_path": [["x"]]}, "lora_path"),
        ("/generate", {"lora_path": {}}, "lora_path"),
        ("/generate", {"lora_path": ["a", "b"]}, "lora_path"),
        ("/generate", {"rid": [1]}, "rid"),
        ("/generate", {"http_worker_ipc": "x"}, "http_worker_ipc"),
    ],
)
def test_what_would_harm_sglang_is_refused(path: str, document: dict[str, Any], field: str) -> None:
    with pytest.raises(RlctlError) as refused:
        read(path, document)
    assert refused.value.reason in (Reason.FIELD_INVALID, Reason.UNSUPPORTED)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("path", "document", "adapter", "model"),
    [
        ("/v1/chat/completions", {"model": "m:", "lora_path": "policy@7#3"}, "policy@7#3", "base"),
        ("/v1/completions", {"model": "m:a", "lora_path": "other"}, "a", "base"),
        ("/v1/completions", {"model": "base:b", "lora_path": None}, "b", "base"),
        ("/generate", {"lora_path": "a"}, "a", None),
        ("/generate", {"lora_path": ["a", "a"]}, "a", None),
        ("/generate", {"lora_path": None}, "", None),
        ("/v1/score", {"model": "m: ", "lora_path": ""}, "", "base"),
    ],
)
def test_sglang_gets_no_adapter_but_that_of_the_gate(
    path: str, document: dict[str, Any], adapter: str, model: str | None
) -> None:
    request = HttpRequest("POST", path, (), json.dumps(document).encode(), document)
    reading = READER.read(request)
    assert reading.adapter == adapter
    sent = json.loads(overridden(request.body, reading.fields))
    assert (sent["lora_path"], sent.get("model")) == (None, model)
    held = Held("a@2#1", Adapter(name=adapter), 1, 1)
    READER.put_adapter(request, reading, held)
    sent = json.loads(overridden(request.body, reading.fields))
    assert (sent["lora_path"], sent.get("model")) == ("a@2#1", model and "base:a@2#1")


@pytest.mark.parametrize(
    ("path", "document", "rid", "names"),
    [
        ("/generate", {"text": "1", "rid": "10"}, "2:10", {"2:10": "10"}),
        ("/generate", {"text": ["1", "2"], "rid": "x"}, ["3:x_0", "3:x_1"], {"3:x_0": "x_0", "3:x_1": "x_1"}),
        ("/generate", {"input_ids": [[1], [2]], "rid": ["a", "b"]}, ["1:a", "1:b"], {"1:a": "a", "1:b": "b"}),
    ],
)
def test_no_id_of_a_caller_is_the_beginning_of_another(
    path: str, document: dict[str, Any], rid: object, names: dict[str, str]
) -> None:
    reading = read(path, document)
    assert (reading.fields["rid"], reading.names) == (rid, names)
    assert list(reading.engine_rids) == ([rid] if isinstance(rid, str) else rid)


@pytest.mark.parametrize(
    ("path", "document", "count"),
    [
        ("/generate", {"input_ids": [1, 2]}, None),
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/embeddings", {"input": [1, 2]}, None),
        ("/v1/completions", {"prompt": [[1], [2]]}, 2),
        ("/v1/chat/completions", {"messages": [{}, {}]}, None),
    ],
)
def test_every_prompt_gets_an_id(path: str, document: dict[str, Any], count: int | None) -> None:
    reading = read(path, document)
    assert isinstance(reading.fields["rid"], str) == (count is None)
    assert len(reading.engine_rids) == reading.samples == (count or 1)
    assert read(path, {**document, "n": 3}).samples == 3 * (count or 1)
    assert not read(path, {**document, "n": 3}).engine_rids, "SGLang gives the samples ids of their own"


@pytest.mark.parametrize(
    ("document", "prepared"),
    [
        ({"sampling_params": SCHEMA}, True),
        ({"sampling_params": [{}, SCHEMA]}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"output_config": {"format": {"type": "json_schema"}}}, True),
        ({"tools": [{"strict": True}]}, True),
        ({"tools": [{"function": {"strict": True}}]}, True),
        ({"tools": [{"function": {}}], "tool_choice": "required"}, True),
        ({"tools": [{"function": "x"}, 5]}, False),
        ({"tools": 5}, False),
        ({}, False),
    ],
)
def test_requests_with_a_grammar_are_known(document: dict[str, Any], prepared: bool) -> None:
    assert read("/v1/messages", document).prepared == prepared


@pytest.mark.parametrize(("stream", "headers"), [(True, {"Connection": "close"}), (False, {}), (None, {})])
def test_no_request_follows_a_stream_on_its_connection(stream: bool | None, headers: dict[str, str]) -> None:
    assert read("/generate", {"text": "1", "stream": stream}).headers == headers


@pytest.mark.parametrize("failed", [False, True])
async def test_an_engine_that_does_not_run_sends_clients_to_another_stage(
    tiny: tuple[Any, Path], *, failed: bool
) -> None:
    engine = SGLangEngine(EngineConfig(model_path=str(tiny[1])), lambda _: None)
    if failed:
        engine._failed(Reason.ENGINE_FAILED.error("SGLang ended with -9"))
    with pytest.raises(RlctlError) as caught:
        await engine.exchange(HttpRequest("POST", "/generate", ()))
    assert (caught.value.reason, caught.value.http_status) == (Reason.STAGE_NOT_SERVING, 503)
    assert ("SGLang ended with -9" if failed else "not started") in caught.value.message
    await engine.stop()
