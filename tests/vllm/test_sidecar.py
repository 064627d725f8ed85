"""SGLang's interface in front of a real vLLM that the sidecar has launched: every route, both ways of asking vLLM."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from models import changed, greedy
from rlctl_vllm.sidecar.server import SidecarConfig
from sidecar_process import GREEDY, Served

from rlctl.demo.tiny import encode
from rlctl.weights.group.process_group import GroupStore, join

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def fallback(launched: Served) -> Iterator[Served]:
    """A second sidecar at the same vLLM, over /v1/completions, as under a coordinator."""
    engine = launched.server._engine
    assert engine is not None
    upstream = f"unix:{engine.http._socket}"
    served = Served(SidecarConfig(upstream=upstream, route="completions", coordinator="127.0.0.1:5080"))
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(params=["tokens", "completions"])
def sidecar(request: pytest.FixtureRequest, launched: Served, fallback: Served) -> Iterator[Served]:
    """Either; every test leaves it without requests."""
    yield launched if request.param == "tokens" else fallback
    launched.until(lambda: launched.load() == 0)


def test_greedy_tokens_logprobs_and_meta(sidecar: Served, tiny: tuple[Any, Path]) -> None:
    ids = encode("1+2=")
    answer = sidecar.generate(ids, return_logprob=True, logprob_start_len=0, top_logprobs_num=2, rid="mine")
    tokens = greedy(tiny[0], ids, 8)
    assert answer["output_ids"] == tokens
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    with torch.no_grad():
        logits = tiny[0](input_ids=torch.tensor([ids + tokens])).logits[0]
    wanted = torch.log_softmax(logits.float(), -1)
    for position, (value, token, text) in enumerate(meta["output_token_logprobs"], len(ids) - 1):
        assert value == pytest.approx(wanted[position, token].item(), abs=1e-3)
        assert text is None
        tops = meta["output_top_logprobs"][position - len(ids) + 1]
        assert [top[1] for top in tops] == wanted[position].topk(2).indices.tolist()
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    for position, (value, token, _) in enumerate(meta["input_token_logprobs"][1:]):
        assert value == pytest.approx(wanted[position, token].item(), abs=1e-3)
    assert meta["input_top_logprobs"][0] is None
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", len(ids), 8)
    assert meta["weight_version"] == sidecar.must("/get_weight_version")["weight_version"]


def test_streams_are_cumulative_and_end_with_the_whole(sidecar: Served) -> None:
    whole = sidecar.generate(encode("1+2="), return_logprob=True)
    body = {"input_ids": encode("1+2="), "sampling_params": GREEDY, "return_logprob": True}
    events = sidecar.events(body)
    assert len(events) > 1
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    for event in events:
        assert whole["text"].startswith(event["text"])
        assert len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["text"] == whole["text"]


def test_texts_batches_and_samples(sidecar: Served, tiny: tuple[Any, Path]) -> None:
    prompts = ["1+2=", "7+8="]
    answers = sidecar.must("/generate", {"text": prompts, "sampling_params": GREEDY, "rid": ["a", "b"]})
    assert [answer["output_ids"] for answer in answers] == [
        greedy(tiny[0], encode(each)[-len(each) :], 8) for each in prompts
    ]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    sampling = [{**GREEDY, "max_new_tokens": 3}, {**GREEDY, "max_new_tokens": 5}]
    each = sidecar.must("/generate", {"input_ids": [encode(p) for p in prompts], "sampling_params": sampling})
    assert [len(answer["output_ids"]) for answer in each] == [3, 5]
    many = {"max_new_tokens": 6, "n": 3, "ignore_eos": True, "sampling_seed": 4}
    drawn = [sidecar.must("/generate", {"text": "1+2=", "sampling_params": many, "rid": "m"}) for _ in range(2)]
    assert [answer["meta_info"]["id"] for answer in drawn[0]] == ["m_0", "m_1", "m_2"]
    assert [answer["output_ids"] for answer in drawn[0]] == [answer["output_ids"] for answer in drawn[1]]
    assert {len(answer["output_ids"]) for answer in drawn[0]} == {6}
    events = sidecar.events({"text": "1+2=", "sampling_params": many})
    assert {event["index"] for event in events} == {0, 1, 2}
    last = {event["index"]: event["output_ids"] for event in events}
    assert [last[index] for index in range(3)] == [answer["output_ids"] for answer in drawn[0]]


def test_stops_are_named_and_cached_tokens_counted(sidecar: Served) -> None:
    stop = sidecar.generate(encode("1+2="), new_tokens=40, sampling={"stop_token_ids": list(range(3, 16))})
    assert stop["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop["output_ids"][-1]}
    words = {"temperature": 1.0, "stop": ["7", "8", "9", "1"], "ignore_eos": True}
    for kept in (False, True):
        sampling = {**words, "no_stop_trim": kept, "sampling_seed": 3}
        answer = sidecar.generate(encode("1"), new_tokens=400, sampling=sampling)
        matched = answer["meta_info"]["finish_reason"]["matched"]
        assert matched in words["stop"]
        assert answer["text"].endswith(matched) is kept
    ids = [5 + i % 9 for i in range(70)]
    assert sidecar.call("/flush_cache")[0] == 200
    cached = [sidecar.generate(ids, new_tokens=2)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 64]
    assert sidecar.call("/flush_cache", {})[0] == 200
    assert sidecar.generate(ids, new_tokens=2)["meta_info"]["cached_tokens"] == 0


def test_every_field_of_the_request_in_the_table(sidecar: Served) -> None:
    """As a rollout sends it: all of them at once."""
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 16,
        "stop": ["=="],
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    body = {"input_ids": [5, 14], "input_tokens": [5, 14], "return_logprob": True, "stream": False}
    answer = sidecar.must("/generate", {**body, "sampling_params": sampling})
    values = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in values] == answer["output_ids"]
    assert all(entry[0] <= 0 for entry in values)


@pytest.mark.parametrize(
    ("fields", "status", "reason", "field"),
    [
        ({"nonsense": 1}, 400, "FIELD_INVALID", "nonsense"),
        ({"sampling_params": {"max_tokens": 1}}, 400, "FIELD_INVALID", "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": "hot"}}, 400, "FIELD_INVALID", "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 2}}, 400, "FIELD_INVALID", "sampling_params.top_p"),
        ({"input_tokens": [3]}, 400, "FIELD_CONFLICT", "input_tokens"),
        ({"input_ids": None}, 400, "FIELD_REQUIRED", "text"),
        ({"input_ids": []}, 400, "FIELD_REQUIRED", "input_ids.ids"),
        ({"input_ids": [99]}, 400, "FIELD_INVALID", "input_ids.ids"),
        ({"input_ids": [3] * 600}, 400, "PROMPT_TOO_LONG", ""),
        ({"lora_path": "a"}, 501, "UNSUPPORTED", "lora_path"),
        ({"rid": ["a", "b"]}, 400, "FIELD_INVALID", "rid"),
    ],
)
def test_what_cannot_be_done_is_refused(
    launched: Served, fields: dict[str, Any], status: int, reason: str, field: str
) -> None:
    error = launched.refusal("/generate", {"input_ids": [5, 14], **fields}, status)
    assert (error["reason"], error["field"]) == (reason, field)


def test_requests_are_aborted_with_what_they_have(sidecar: Served) -> None:
    long = {"temperature": 1.0, "max_new_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        body = {"input_ids": [5], "sampling_params": {**long, "n": 2}, "return_logprob": True}
        both = [pool.submit(sidecar.must, "/generate", {**body, "rid": rid}) for rid in ("one", "two")]
        sidecar.until(lambda: sidecar.load() >= 4)
        assert sidecar.refusal("/generate", {**body, "rid": "one"}, 409)["reason"] == "RID_IN_USE"
        told = sidecar.must("/abort_request", {"rid": "one"})
        assert (told["aborted"], told["unknown_rids"]) == (1, [])
        for answer in both[0].result():
            meta = answer["meta_info"]
            assert meta["finish_reason"]["type"] == "abort"
            assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) < 450
        assert not both[1].done()
        assert sidecar.must("/abort_request", {"rid": "nobody"})["unknown_rids"] == ["nobody"]
        assert sidecar.must("/abort_request", {"abort_all": True})["aborted"] == 1
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in both[1].result()} == {"abort"}


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_storm_of_aborts_leaves_nothing(sidecar: Served, requests: int) -> None:
    """Rounds of requests, all aborted between them: each comes back, partial or whole, and the load is 0."""

    async def rounds() -> list[Any]:
        import aiohttp

        long = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
        body = {"input_ids": [5, 14], "sampling_params": long, "return_logprob": True}
        answers: list[Any] = []
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def ask() -> Any:
                async with session.post(sidecar.url + "/generate", json=body) as response:
                    assert response.status == 200
                    return await response.json()

            async def until(count: int) -> None:
                load = -1
                while load != count:
                    async with session.get(sidecar.url + "/v1/loads") as response:
                        load = int((await response.json())["loads"][0]["num_total_reqs"])

            for _ in range(2):
                asking = [asyncio.create_task(ask()) for _ in range(requests // 2)]
                await until(requests // 2)
                async with session.post(sidecar.url + "/abort_request", json={"abort_all": True}) as response:
                    assert response.status == 200
                answers += await asyncio.wait_for(asyncio.gather(*asking), 60)
                await until(0)
        return answers

    answers = asyncio.run(rounds())
    assert len(answers) == requests // 2 * 2
    kinds = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    assert kinds <= {"abort", "length"}
    assert "abort" in kinds
    for answer in answers:
        assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    assert any(answer["output_ids"] for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "abort")
    assert sidecar.generate(encode("1"), new_tokens=2)["meta_info"]["completion_tokens"] == 2


def test_a_caller_that_leaves_ends_its_request(sidecar: Served) -> None:
    for stream in (False, True):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 450, "ignore_eos": True}, "stream": stream}
        data = json.dumps(body).encode()
        host, _, port = sidecar.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as caller:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            caller.sendall(head.encode() + data)
            sidecar.until(lambda: sidecar.load() == 1)
        sidecar.until(lambda: sidecar.load() == 0)


def test_health_info_and_what_is_not_there(sidecar: Served, tiny: tuple[Any, Path]) -> None:
    assert sidecar.call("/health")[0] == 200
    assert sidecar.call("/health_generate")[0] == 200
    info = sidecar.must("/model_info")
    assert (info["model_path"], info["is_generation"]) == (str(tiny[1]), True)
    assert sidecar.call("/nothing")[0] == 404


def test_a_flush_while_requests_run_is_refused(launched: Served) -> None:
    long = {"max_new_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launched.must, "/generate", {"input_ids": [5] * 70, "sampling_params": long})
        launched.until(lambda: launched.must("/v1/loads")["loads"][0]["num_running_reqs"] == 1)
        assert launched.refusal("/flush_cache", {})["reason"] == "ACTIVE_REQUESTS"
        launched.must("/abort_request", {"abort_all": True})
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert launched.call("/flush_cache?timeout=5")[0] == 200


def test_pauses_hold_requests_and_health_says_so(launched: Served) -> None:
    for mode in ("retract", "in_place", "abort"):
        assert launched.must("/pause_generation", {"mode": mode})["status"] == "ok"
        with ThreadPoolExecutor(2) as pool:
            held = pool.submit(launched.generate, encode("1"))
            launched.until(lambda: launched.load() == 1)
            assert launched.refusal("/health_generate", None, 503)["reason"] == "STAGE_NOT_SERVING"
            assert launched.call("/health")[0] == 200
            assert not held.done()
            # One that a pause holds back can be ended too.
            cut = pool.submit(launched.generate, encode("2"), rid="cut")
            launched.until(lambda: launched.load() == 2)
            launched.must("/abort_request", {"rid": "cut"})
            assert cut.result()["meta_info"]["finish_reason"]["type"] == "abort"
            launched.must("/continue_generation", {})
            assert len(held.result()["output_ids"]) == 8
    assert launched.refusal("/pause_generation", {"mode": "nap"})["field"] == "mode"


def test_weights_from_disk_and_their_version(launched: Served, tiny: tuple[Any, Path], tmp_path: Path) -> None:
    before = launched.must("/get_weight_version")["weight_version"]
    model = changed(tiny[0], seed=1)
    saved = tiny[1].parent / "saved"
    model.save_pretrained(saved)
    running_long = {"max_new_tokens": 450, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launched.must, "/generate", {"input_ids": [5], "sampling_params": running_long})
        launched.until(lambda: launched.load() == 1)
        told = launched.refusal("/update_weights_from_disk", {"model_path": str(saved)})
        assert told["reason"] == "ACTIVE_REQUESTS"
        assert running.result()["meta_info"]["completion_tokens"] == 450, "the refusal let it go on"
    assert launched.must("/get_weight_version")["weight_version"] == before
    done = launched.must("/update_weights_from_disk", {"model_path": str(saved), "weight_version": "7"})
    assert done["success"]
    assert launched.must("/get_weight_version") == {"weight_version": 7}
    answer = launched.generate(encode("3+"))
    assert answer["output_ids"] == greedy(model, encode("3+"), 8)
    assert answer["meta_info"]["weight_version"] == 7
    assert answer["meta_info"]["weight_versions"] == [{"version": 7, "start": 0, "end": 8}]
    broken = {"model_path": str(tmp_path / "nowhere"), "weight_version": "8"}
    status, refused = launched.call("/update_weights_from_disk", broken)
    assert status >= 400
    assert refused["success"] is False
    assert launched.generate(encode("3+"))["meta_info"]["weight_version"] == 7, "it goes on as it was"
    launched.must("/update_weights_from_disk", {"model_path": str(tiny[1])})
    assert launched.generate(encode("3+"))["output_ids"] == greedy(tiny[0], encode("3+"), 8)
    assert launched.must("/update_weight_version", {"new_version": "step-9"})["new_version"] == "step-9"
    assert launched.must("/get_weight_version") == {"weight_version": "step-9"}


def test_what_is_frozen_in_place_is_computed_anew_where_an_update_flushes(
    launched: Served, tiny: tuple[Any, Path]
) -> None:
    model = changed(tiny[0], seed=3)
    model.save_pretrained(tiny[1].parent / "flushed")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(launched.generate, [5], new_tokens=450)
        launched.until(lambda: launched.load() == 1)
        launched.must("/pause_generation", {"mode": "in_place"})
        body = {"model_path": str(tiny[1].parent / "flushed"), "weight_version": "31"}
        assert launched.must("/update_weights_from_disk", body)["success"]
        launched.must("/continue_generation", {})
        answer = running.result()
    before, after = answer["meta_info"]["weight_versions"]
    assert (before["end"], after["version"], after["end"]) == (after["start"], 31, 450)
    came = answer["output_ids"][: after["start"]]
    assert answer["output_ids"][after["start"] :][:8] == greedy(model, [5, *came], 8)
    launched.must("/update_weights_from_disk", {"model_path": str(tiny[1])})


def test_weights_over_a_group_as_slime_sends_them(launched: Served, tiny: tuple[Any, Path]) -> None:
    """Paused, a call for each bucket, one broadcast for each tensor; what is not whole is never served."""
    model = changed(tiny[0], seed=2)
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    store = GroupStore("127.0.0.1")
    place = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        named = {"group_name": "slime-pp_0", "backend": "gloo"}
        joining = pool.submit(launched.must, "/init_weights_update_group", {**place, **named})
        group = join(store, name="slime-pp_0", rank=0, world_size=2, timeout_s=60)
        assert joining.result()["success"]

        def send(bucket: list[tuple[str, torch.Tensor]], **fields: Any) -> Any:
            body = {
                "names": [name for name, _ in bucket],
                "dtypes": ["float32" for _ in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": "slime-pp_0",
                "flush_cache": False,
                **fields,
            }
            telling = pool.submit(launched.call, "/update_weights_from_distributed", body)
            for _, tensor in bucket:
                group.broadcast(tensor.contiguous())
            return telling.result()

        try:
            launched.must("/pause_generation", {})
            for part in (weights[:5], weights[5:]):
                status, told = send(part, weight_version="12")
                assert status == 200, told
            launched.must("/continue_generation", {})
            answer = launched.generate(encode("3+"))
            assert answer["output_ids"] == greedy(model, encode("3+"), 8)
            assert answer["meta_info"]["weight_version"] == 12
            launched.must("/pause_generation", {})
            assert send(weights[:5])[0] == 200
            status, told = launched.call("/continue_generation", {})
            assert (status, told["error"]["reason"]) == (400, "WEIGHTS_INCOMPLETE")
            assert launched.refusal("/generate", {"input_ids": [5]})["reason"] == "WEIGHTS_DIRTY"
            launched.must("/update_weights_from_disk", {"model_path": str(tiny[1])})
            launched.must("/continue_generation", {})
            assert launched.generate(encode("3+"))["output_ids"] == greedy(tiny[0], encode("3+"), 8)
            with ThreadPoolExecutor(1) as asking:
                running = asking.submit(launched.generate, [5], new_tokens=450)
                launched.until(lambda: launched.load() == 1)
                launched.must("/pause_generation", {"mode": "in_place"})
                for part in (weights[:5], weights[5:]):  # none of which wants a flush: what is frozen keeps its entries
                    assert send(part, weight_version="13")[0] == 200
                launched.must("/continue_generation", {})
                assert running.result()["meta_info"]["weight_version"] == 13
            launched.must("/update_weights_from_disk", {"model_path": str(tiny[1])})
        finally:
            launched.must("/destroy_weights_update_group", {"group_name": "slime-pp_0"})
            group.close()
            store.close()


def test_admin_verbs_under_a_coordinator_name_it(fallback: Served) -> None:
    for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        error = fallback.refusal(path, {}, 403)
        assert "127.0.0.1:5080" in error["message"]


def test_bodies_of_admin_verbs_are_checked(launched: Served) -> None:
    assert launched.call("/update_weights_from_disk", {})[1]["error"]["field"] == "model_path"
    assert launched.call("/pause_generation", {"how": 1})[1]["error"]["field"] == "how"
    wrong = {"names": ["a"], "dtypes": [], "shapes": [[1]]}
    assert launched.call("/update_weights_from_distributed", wrong)[1]["error"]["reason"] == "LENGTH_MISMATCH"
    assert launched.call("/end_weight_update", {})[1]["error"]["reason"] == "UPDATE_NOT_FOUND"
