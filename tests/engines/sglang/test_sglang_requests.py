"""Requests in SGLang's words, and its settings, without a server."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_sglang.options import VENV, Options, interpreter, parse_options, refuse_workers
from rlctl_sglang.requests.bodies import Limits, bodies
from rlctl_sglang.requests.requests import Native, Stamps, _finish
from rlctl_sglang.server import facts
from rlctl_sglang.server.facts import Facts
from rlctl_sglang.server.server import Server

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call, EngineConfig
from rlctl.v1.common_pb2 import TRANSPORT_CUDA_IPC, TRANSPORT_TORCH_NCCL, WeightVersion
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, GenerateRequest, SamplingParams, TokenIds

LIMITS = Limits(vocab_size=16, context_length=32, longest_prompt=30)


def request(ids: list[int], **fields: Any) -> GenerateRequest:
    return GenerateRequest(input_ids=TokenIds(ids=ids), **fields)


def test_each_sample_is_a_request_of_its_own() -> None:
    params = SamplingParams(max_new_tokens=100, temperature=0.0, n=2, stop=["x"], stop_token_ids=[3])
    first, second = bodies(request([1, 2], sampling_params=params, top_logprobs_num=2), ["a", "b"], LIMITS)
    assert (first["rid"], second["rid"]) == ("a", "b")
    assert {**first, "rid": ""} == {**second, "rid": ""}
    assert first["input_ids"] == [1, 2]
    assert first["stream"]
    assert first["return_logprob"]
    assert first["logprob_start_len"] == -1
    sampling = first["sampling_params"]
    assert "n" not in sampling
    assert sampling["max_new_tokens"] == 30, "what fits beside the prompt"
    assert (sampling["stop"], sampling["stop_token_ids"], sampling["top_k"]) == (["x"], [3], -1)


def test_seeds_differ_from_sample_to_sample_where_they_are_honoured() -> None:
    limits = Limits(vocab_size=16, context_length=32, longest_prompt=30, seeds=True)
    made = bodies(request([1], sampling_params=SamplingParams(seed=7, n=2)), ["a", "b"], limits)
    assert [body["sampling_params"]["sampling_seed"] for body in made] == [7, 8]


def test_a_request_to_a_pair_carries_sglangs_fields_a_room_for_each_sample() -> None:
    """As SGLang counts them for a batch (``_normalize_bootstrap_params`` in its io_struct.py)."""
    params = SamplingParams(n=2)
    place = {"model": "m", "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 40}
    fields = {**place, "bootstrap_version_seq": 0}
    for mode in ("prefill", "decode"):
        limits = Limits(vocab_size=16, context_length=32, longest_prompt=30, mode=mode)
        made = bodies(request([1], sampling_params=params, **fields), ["a", "b"], limits)
        assert [body["bootstrap_room"] for body in made] == [40, 41]
        assert {(body["bootstrap_host"], body["bootstrap_port"]) for body in made} == {("10.0.0.1", 8998)}
        with pytest.raises(RlctlError) as caught:
            bodies(request([1]), ["a"], limits)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_REQUIRED, "bootstrap_room")
        with pytest.raises(RlctlError) as caught:
            bodies(request([1], **place), ["a"], limits)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_REQUIRED, "bootstrap_version_seq")
    assert "bootstrap_room" not in bodies(request([1]), ["a"], LIMITS)[0]
    with pytest.raises(RlctlError) as caught:
        bodies(request([1], **fields), ["a"], LIMITS)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "bootstrap_room")


def test_a_sample_that_is_cut_between_two_servers_is_told_from_one_that_failed() -> None:
    told = {"type": "abort", "status_code": 500}
    failed = "Decode transfer failed for request rank=0 with exception KVTransferError(bootstrap_room=7): "
    cut = _finish(told | {"message": failed + "Aborted by AbortReq."})
    assert (cut.type, cut.message) == (FINISH_TYPE_ABORT, failed + "Aborted by AbortReq.")
    for message, reason in ((failed + "Lost connection", Reason.HANDOVER_FAILED), ("oops", Reason.ENGINE_FAILED)):
        with pytest.raises(RlctlError) as caught:
            _finish(told | {"message": message})
        assert caught.value.reason is reason


def test_where_decode_servers_find_a_prefill_server() -> None:
    told = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8999}
    assert Facts(told, {}).bootstrap("http://[::1]:30000") == ("::1", 8999)
    for other in ({"disaggregation_mode": "decode"}, {"disaggregation_mode": "null"}, {}):
        assert Facts(other, {}).bootstrap("http://h:1") is None


ON_GPU = ("device.cuda", "transport.torch_nccl", "transport.cuda_ipc")


@pytest.mark.parametrize(
    ("told", "experimental"),
    [
        ({"device": "cuda"}, [*ON_GPU]),
        ({"disaggregation_mode": "prefill"}, [*ON_GPU, "disaggregation"]),
        ({"device": "cpu"}, []),
        ({"device": "cpu", "disaggregation_mode": "decode"}, []),
    ],
)
def test_what_has_never_run_on_a_gpu_is_called_experimental(told: dict[str, str], experimental: list[str]) -> None:
    rank = {"rank": 0, "host_id": "h"}
    found = Facts(told, {}, [rank]).capabilities(readable=False, probes=False)
    assert list(found.experimental) == experimental
    for transport in (TRANSPORT_TORCH_NCCL, TRANSPORT_CUDA_IPC):
        assert (transport in found.transports) is bool(experimental)
    assert TRANSPORT_CUDA_IPC not in Facts(told, {}).capabilities(readable=False, probes=False).transports


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, ""),
        ({"load_format": "dummy"}, "not started with its checkpoint's weights"),
        ({"dp_size": 2}, "data-parallel ranks"),
    ],
)
def test_servers_whose_decode_cannot_be_compared(told: dict[str, Any], why: str) -> None:
    found = Facts(told, {}).no_decode_check
    assert why in found
    assert bool(found) is bool(why)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rid": "mine"}, "engine_fields"),
        ({"input_embeds": [1]}, "engine_fields"),
        ({"custom_logit_processor": "pickle"}, "engine_fields"),
        ({"sampling_params": {"n": 3}}, "engine_fields.sampling_params"),
        ({"sampling_params": [1]}, "engine_fields.sampling_params"),
        ({"sampling_params": {"custom_params": {"a": float("nan")}}}, "engine_fields"),
    ],
)
def test_fields_that_would_contradict_or_endanger_something(fields: dict[str, Any], field: str) -> None:
    struct = Struct()
    struct.update(fields)
    with pytest.raises(RlctlError) as refused:
        bodies(request([1], engine_fields=struct), ["a"], LIMITS)
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, field)


def test_a_refusal_that_comes_as_an_event_is_told_in_its_own_words() -> None:
    """Of a request that is streamed SGLang answers 200, and says then what is wrong with it."""
    http: Any = None
    native = Native(
        http,
        LIMITS,
        Stamps(""),
        LoraTable(),
        incremental=True,
        stopped=lambda: False,
        admit=lambda _: None,
        admit_passed=lambda _: None,
    )
    (reading,) = asyncio.run(native.begin(request([1]), ["a"]))
    error = {"message": "at most 32 stop strings are allowed", "type": "invalid_request_error", "code": 400}
    with pytest.raises(RlctlError) as refused:
        reading.take({"error": error})
    assert (refused.value.reason, refused.value.message) == (Reason.FIELD_INVALID, f"SGLang: {error['message']}")


def test_the_longest_prompt_is_shorter_than_what_sglang_refuses() -> None:
    model = {"vocab_size": 16, "max_position_embeddings": 512}
    assert Facts({"max_req_input_len": 506}, {}).limits(model).longest_prompt == 505
    assert Facts({}, {}).limits(model).longest_prompt == 511


@pytest.mark.parametrize(
    ("load_format", "invents"),
    [("auto", False), (None, False), ("safetensors", False), ("dummy", True), ("pt", True), ("mistral", True)],
)
def test_weights_that_are_made_up_are_no_checkpoints(load_format: str | None, invents: bool) -> None:
    assert Facts({"load_format": load_format}, {}).invents is invents


def test_fields_that_are_passed_on() -> None:
    struct = Struct()
    struct.update({"priority": 3, "sampling_params": {"json_schema": "{}"}})
    (body,) = bodies(request([1], engine_fields=struct), ["a"], LIMITS)
    assert body["priority"] == 3
    assert body["sampling_params"]["json_schema"] == "{}"


def test_versions_of_the_same_label_are_told_apart() -> None:
    stamps = Stamps("default")
    one, other = WeightVersion(label="x", sequence=1), WeightVersion(label="x", sequence=2)
    stamps.bind(one)
    assert stamps.version("default") == one
    stamps.bind(other, Stamps.of(other))
    assert stamps.version(Stamps.of(other)) == other
    assert stamps.version(Stamps.of(one)) is None
    assert stamps.version("default") == one


def test_entries_are_of_the_version_of_the_last_flush() -> None:
    stamps = Stamps("default")
    stamps.bind(WeightVersion(label="a", sequence=1))
    new = WeightVersion(label="b", sequence=2)
    stamps.bind(new, Stamps.of(new))
    stamps.label = Stamps.of(new)
    assert stamps.oldest_kv.sequence == 1
    stamps.flushed()
    assert stamps.oldest_kv == new


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model_path": "x"}, "options.model_path"),
        ({"api_key": "x"}, "options.api_key"),
        ({"--port": "1"}, "options.--port"),
        ({"url": "127.0.0.1:1"}, "options.url"),
        ({"url": "http://h", "mem_fraction_static": "0.5"}, "options.mem_fraction_static"),
        ({"api_key_file": "/nowhere"}, "options.api_key_file"),
        ({"url": "http://h", "api_key_file": "/nowhere"}, "options.api_key_file"),
        ({"allowed_roots": "relative"}, "options.allowed_roots"),
        ({"start_s": "nan"}, "options.start_s"),
        ({"start_s": "0"}, "options.start_s"),
    ],
)
def test_settings_that_are_refused(options: dict[str, str], field: str) -> None:
    with pytest.raises(RlctlError) as refused:
        parse_options(options)
    assert refused.value.field == field


def test_settings_that_are_taken(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = parse_options({"url": "http://h:1/", "api_key_file": str(key)})
    assert (options.url, options.api_key, options.admin_key) == ("http://h:1", "secret", "secret")
    assert "secret" not in repr(options)
    assert parse_options({"mem_fraction_static": "0.5"}).arguments == {"mem_fraction_static": "0.5"}


def test_a_server_that_others_can_drive_is_not_fenced() -> None:
    for admin_key, fenced in (("", False), ("k", True)):
        server = Server(EngineConfig("m"), Options(url="http://127.0.0.1:1", admin_key=admin_key), lambda _: None)
        assert (server.fenced, server.launched) == (fenced, False)


def test_where_sglang_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VENV, str(tmp_path))
    with pytest.raises(RlctlError) as refused:
        interpreter(Options())
    assert "tools/engines install sglang" in refused.value.next_step
    (tmp_path / "bin").mkdir()
    os.symlink(sys.executable, tmp_path / "bin" / "python")
    assert interpreter(Options()) == str(tmp_path / "bin" / "python")
    assert interpreter(Options(python=sys.executable)) == sys.executable


@pytest.mark.parametrize("number", ["2", 2])
def test_several_http_workers_are_refused(number: Any) -> None:
    with pytest.raises(RlctlError, match="2 tokenizer workers") as refused:
        refuse_workers({"tokenizer_worker_num": number})
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, "options.tokenizer_worker_num")
    for fine in ({}, {"tokenizer_worker_num": 1}, {"tokenizer_worker_num": "1"}, {"tokenizer_worker_num": None}):
        refuse_workers(fine)
    with pytest.raises(RlctlError):
        parse_options({"tokenizer_worker_num": "4"})


class Answers:
    """A server's answers, by path."""

    def __init__(self, **info: object) -> None:
        self.told: dict[str, Any] = {
            "/server_info": {"version": "0.5.23", "device": "cpu", **info},
            "/openapi.json": {},
        }
        self.told["/openapi.json"]["paths"] = dict.fromkeys(
            route for routes in facts._ROUTES.values() for route in routes
        )

    async def ask(self, path: str, **_: object) -> Any:
        return self.told[path]


async def attach() -> list[dict[str, Any]]:
    return [{"rank": 0}]


async def test_what_keeps_entries_past_a_flush_takes_no_weights() -> None:
    writes = {"UpdateWeightsFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor"}
    for storage, refused in ((None, set()), ("file", writes)):
        control: Any = Answers(hicache_storage_backend=storage)
        found = await facts.ask(control, sorted(verb for verb in VERBS), attach, Call("c", 0.0))
        assert writes & found.unsupported.keys() == refused
        assert all("a flush does not empty" in found.unsupported[verb] for verb in refused)


def test_spaces_between_special_tokens_are_said_only_where_the_caller_does() -> None:
    for params, said in ((SamplingParams(), None), (SamplingParams(spaces_between_special_tokens=False), False)):
        (made,) = bodies(request([1], sampling_params=params), ["a"], LIMITS)
        assert made["sampling_params"].get("spaces_between_special_tokens") is said
