"""Promises of SGLang's HTTP interface, checked over real HTTP: at real SGLang, and at fleets behind a gateway.

A module imports these tests (``from sglang_suite import *``) and defines the server by its fixture ``server``.
Deliberate differences of a fleet are marked by ``server.real``, and listed in ``docs/dialects.md``.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from models import changed, greedy
from torch.distributed import TCPStore

import rlctl
from rlctl.ports import new_uuid7
from rlctl.weights.group.process_group import join

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "integrations"))

from tiny_trainer import broadcast, buckets, described, free_port, join_as_source

Answer = tuple[int, Any]


@dataclass
class Server:
    """The server under test.

    Attributes:
        http: HTTP client of the tests.
        engines: address of every engine.
        ranks: number of ranks of each engine.
        tiny: the model and its initial checkpoint.
        root: address of the fleet; "": no fleet, but SGLang itself.
        group: name of the last group.
        key: the key for a path.
        releases: the server really releases memory; SGLang on a CPU only claims a release.
        compares: the checker keeps a snapshot and compares; SGLang's plug-in does neither.
        splits_renames: a new name of a version begins a new span in a running request's answer.
    """

    http: aiohttp.ClientSession
    engines: Sequence[str]
    ranks: Sequence[int]
    tiny: tuple[Any, Path]
    root: str = ""
    group: str = ""
    key: Callable[[str], str] | None = None
    releases: bool = True
    compares: bool = True
    splits_renames: bool = True

    @property
    def real(self) -> bool:
        return not self.root

    @classmethod
    @asynccontextmanager
    async def at(
        cls,
        engines: Sequence[str],
        ranks: Sequence[int],
        tiny: tuple[Any, Path],
        *,
        root: str = "",
        key: Callable[[str], str] | None = None,
        releases: bool = True,
        compares: bool = True,
        splits_renames: bool = True,
    ) -> AsyncIterator[Server]:
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            can = {"releases": releases, "compares": compares, "splits_renames": splits_renames}
            server = cls(http, engines, ranks, tiny, root, key=key, **can)
            before = await server.version()
            yield server
            await server.every("POST", "/abort_request", {"abort_all": True})
            ready = [status for status, _ in await server.every("GET", "/ready")]
            if await server.version() == before and set(ready) == {200}:
                return
            # Each test ends with the checkpoint loaded, and generation running.
            reset = {"model_path": str(tiny[1]), "weight_version": "reset"}
            await server.every("POST", "/update_weights_from_disk", reset)
            await server.every("POST", "/continue_generation", {})

    async def ask(
        self, method: str, path: str, body: Any = None, *, engine: int = 0, at: str = "", **headers: str
    ) -> Answer:
        url = (at or self.engines[engine]) + path
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key(path)}"
        async with self.http.request(method, url, json=body, headers=headers) as response:
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()

    async def every(self, method: str, path: str, body: Any = None) -> list[Answer]:
        """Send the same request to every engine concurrently."""
        return await asyncio.gather(*(self.ask(method, path, body, engine=i) for i in range(len(self.engines))))

    async def form(self) -> Any:
        """Form a group with this process as rank 0, under a fresh name: torch accepts no name twice."""
        name = self.group = f"suite-{new_uuid7()}"
        port, world_size = free_port(), 1 + sum(self.ranks)
        bodies = [
            {
                "master_address": "127.0.0.1",
                "master_port": str(port),  # SGLang's own tests send a text
                "rank_offset": 1 + sum(self.ranks[:index]),
                "world_size": world_size,
                "group_name": name,
                "backend": "gloo",
            }
            for index in range(len(self.ranks))
        ]
        source = asyncio.create_task(asyncio.to_thread(join_as_source, name, port, world_size))
        joined = await asyncio.gather(
            *(self.ask("POST", "/init_weights_update_group", body, engine=i) for i, body in enumerate(bodies))
        )
        assert [(status, body["success"]) for status, body in joined] == [(200, True)] * len(self.ranks), joined
        return await source

    async def send(self, group: Any, model: Any, **fields: Any) -> list[Answer]:
        """Send all buckets of a model; return the last answers."""
        answers: list[Answer] = []
        for bucket in buckets(model):
            body = described(bucket) | {"group_name": self.group, "flush_cache": False} | fields
            told = asyncio.create_task(self.every("POST", "/update_weights_from_distributed", body))
            await asyncio.to_thread(broadcast, group, [tensor for _, tensor in bucket])
            answers = await told
            assert [status for status, _ in answers] == [200] * len(self.engines), answers
        return answers

    async def greedy(self, engine: int, count: int = 6) -> list[int]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
        status, reply = await self.ask("POST", "/generate", body, engine=engine)
        assert status == 200, reply
        return list(reply["output_ids"])

    async def version(self) -> set[str]:
        return {body["weight_version"] for _, body in await self.every("GET", "/model_info")}


PROMPT = [5, 6, 7]

TOKENS = 200
"""Tokens of a request that something else meets while it runs."""


# Reading.


async def test_model_info(server: Server) -> None:
    for path in ("/model_info", "/get_model_info"):
        status, info = await server.ask("GET", path)
        assert status == 200
        assert info["is_generation"] is True
        assert info["architectures"] == ["LlamaForCausalLM"]
        assert info["model_type"] == "llama"
        assert isinstance(info["weight_version"], str)
        assert {
            "model_path",
            "tokenizer_path",
            "served_model_name",
            "load_format",
            "disaggregation_mode",
        } <= info.keys()


async def test_server_info_and_loads(server: Server) -> None:
    for path in ("/server_info", "/get_server_info"):
        status, info = await server.ask("GET", path)
        assert status == 200
        assert {"version", "internal_states", "model_path", "tp_size", "max_total_num_tokens"} <= info.keys()
        numbers = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes", "node_rank", "port", "gpu_id_step")
        assert {type(info[name]) for name in numbers} == {int}
        assert {type(info[name]) for name in ("enable_memory_saver",)} == {bool}
        assert {type(info[name]) for name in ("host", "load_format", "disaggregation_mode")} == {str}
    status, told = await server.ask("GET", "/v1/loads?include=core")
    assert status == 200
    assert {"timestamp", "version", "loads"} <= told.keys()
    (load,) = told["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert load["max_total_num_tokens"] > 0
    status, text = await server.ask("GET", "/v1/loads?format=prometheus")
    assert status == 200
    assert "sglang_num_running_reqs{" in text


async def test_health_and_readiness(server: Server) -> None:
    assert [status for status, _ in await server.every("GET", "/health_generate")] == [200] * len(server.engines)
    assert (await server.ask("GET", "/ready"))[0] == 200
    await server.every("POST", "/pause_generation", {"mode": "retract"})
    assert (await server.ask("GET", "/ready"))[0] == 503
    await server.every("POST", "/continue_generation", {})
    assert (await server.ask("GET", "/ready"))[0] == 200


# Pausing, aborting, flushing.


@pytest.mark.parametrize("mode", [None, "abort", "retract", "in_place"])
async def test_pause_and_continue(server: Server, mode: str | None) -> None:
    status, body = await server.ask("POST", "/pause_generation", {"mode": mode} if mode else {})
    assert (status, body) == (200, {"message": "Generation paused successfully.", "status": "ok"})
    for _ in range(2):  # also without a pause
        status, body = await server.ask("POST", "/continue_generation", {})
        assert (status, body) == (200, {"message": "Generation continued successfully.", "status": "ok"})


async def test_a_bad_body_is_a_400_of_sglangs_form(server: Server) -> None:
    for path, body in (
        ("/pause_generation", {"mode": "bogus"}),
        ("/pause_generation", ["abort"]),
        ("/abort_request", {"abort_all": "perhaps"}),
    ):
        status, refused = await server.ask("POST", path, body)
        assert status == 400, (path, body, refused)
        assert (refused["object"], refused["type"], refused["code"]) == ("error", "Bad Request", 400)
        assert isinstance(refused["message"], str)
    assert (await server.ask("GET", "/ready"))[0] == 200, "nothing was paused"


async def test_unknown_fields_are_ignored(server: Server) -> None:
    assert (await server.ask("POST", "/continue_generation", {"surprise": 1}))[0] == 200
    if not server.real:
        url = server.engines[0] + "/continue_generation"
        async with server.http.post(url, json={"surprise": 1}) as response:
            assert response.headers["X-RLCTL-Unknown-Fields"] == "surprise"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush(server: Server, method: str) -> None:
    status, text = await server.ask(method, "/flush_cache")
    assert status == 200
    assert text.startswith("Cache flushed.")
    assert (await server.ask(method, "/flush_cache?timeout=-1"))[0] == 400


async def test_a_flush_is_refused_beside_requests_and_abort_ends_them(server: Server) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 2 * TOKENS, "ignore_eos": True},
        "rid": new_uuid7(),
    }
    running = asyncio.create_task(server.ask("POST", "/generate", body))
    async with asyncio.timeout(20):
        while (await server.ask("GET", "/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0:
            assert not running.done()
    status, text = await server.ask("GET", "/flush_cache")
    assert (status, "lush" in text) == (400, True)
    assert (await server.ask("POST", "/abort_request", {"rid": body["rid"]}))[0] == 200
    status, reply = await running
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert await server.ask("POST", "/abort_request", {"rid": "nobody"}) == (200, "")
    assert await server.ask("POST", "/abort_request", {}) == (200, "")


@pytest.mark.parametrize(
    "everything", [{"abort_all": True}, {"rid": "", "abort_all": True}, {"rid": None, "abort_all": True}]
)
async def test_all_requests_are_aborted(server: Server, everything: dict[str, Any]) -> None:
    """The bodies come from SGLang's tests, slime and Miles."""
    requests = [running(server, 2 * TOKENS) for _ in range(4)]
    await begun(server)
    assert (await server.ask("POST", "/abort_request", everything))[0] == 200
    for status, told in await asyncio.gather(*requests):
        meta = told["meta_info"]
        assert (status, meta["finish_reason"]["type"]) == (200, "abort")
        assert meta["completion_tokens"] == len(told["output_ids"])


async def test_an_id_that_is_in_use_is_refused(server: Server) -> None:
    """From SGLang's tests of ids: a repeated id is valid in sequence, but not concurrently or within a batch."""
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": sampling, "rid": new_uuid7()}
    for _ in range(2):
        assert (await server.ask("POST", "/generate", body))[0] == 200
    long = {**body, "sampling_params": {**sampling, "max_new_tokens": TOKENS, "ignore_eos": True}}
    first = asyncio.create_task(server.ask("POST", "/generate", long))
    await begun(server)
    status, told = await server.ask("POST", "/generate", body)
    assert status == 400, told
    assert "Duplicate request ID" in told["error"]["message"]
    assert (await first)[0] == 200
    batch = {"input_ids": [PROMPT, PROMPT], "sampling_params": sampling, "rid": [body["rid"]] * 2}
    status, told = await server.ask("POST", "/generate", batch)
    assert status == 400, told
    assert "Duplicate request ID" in told["error"]["message"]
    assert (await server.ask("POST", "/generate", body))[0] == 200


async def test_memory_that_is_resumed_without_a_release(server: Server) -> None:
    if server.real:
        pytest.skip("it ends SGLang")
    status, _ = await server.ask("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert status == (200 if server.releases else 400)
    assert (await server.ask("POST", "/release_memory_occupation", {"tags": ["bogus"]}))[0] == 400


async def test_memory_that_is_released_twice(server: Server) -> None:
    """From SGLang's tests of such calls, refused by newer versions. The cycle must serve afterwards."""
    if server.real or not server.releases:
        pytest.skip("a resume without a release ends SGLang")
    await server.every("POST", "/flush_cache")
    for path, tags in (
        ("/release_memory_occupation", ["kv_cache"]),
        ("/release_memory_occupation", ["kv_cache"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ):
        told = await server.every("POST", path, {"tags": tags})
        assert told == [(200, None)] * len(server.engines), (path, told)
    await server.every("POST", "/continue_generation", {})
    assert await server.greedy(0) == greedy(server.tiny[0], PROMPT, 6)


async def test_memory(server: Server) -> None:
    await server.every("POST", "/pause_generation", {"mode": "abort"})
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        status, body = await server.ask("POST", path, {"tags": ["kv_cache"]})
        assert (status, body) == (200, None) if server.releases else (400, body)
    await server.every("POST", "/continue_generation", {})
    assert await server.greedy(0) == greedy(server.tiny[0], PROMPT, 6)


async def test_a_co_located_step(server: Server) -> None:
    """In slime's order: flush and release during training, update and continue before the KV cache is back."""
    if not server.releases:
        pytest.skip("it gives no memory back")
    group = await server.form()
    model = changed(server.tiny[0], seed=7, scale=0.3)
    assert [status for status, _ in await server.every("GET", "/flush_cache")] == [200] * len(server.engines)
    for path, body in (
        ("/release_memory_occupation", {}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/pause_generation", {}),
        ("/flush_cache", {}),
        ("/begin_weight_update", {}),
    ):
        assert [status for status, _ in await server.every("POST", path, body)] == [200] * len(server.engines), path
    await server.send(group, model, weight_version="asleep")
    for path, body in (("/end_weight_update", {}), ("/continue_generation", {})):
        assert [status for status, _ in await server.every("POST", path, body)] == [200] * len(server.engines), path
    assert await server.version() == {"asleep"}
    if not server.real:
        assert [status for status, _ in await server.every("GET", "/ready")] == [503] * len(server.engines)
    for tag in ("cuda_graph", "kv_cache"):
        told = await server.every("POST", "/resume_memory_occupation", {"tags": [tag]})
        assert told == [(200, None)] * len(server.engines), told
    assert [status for status, _ in await server.every("GET", "/ready")] == [200] * len(server.engines)
    for engine in range(len(server.engines)):
        assert await server.greedy(engine) == greedy(model, PROMPT, 6)
    await server.every("POST", "/destroy_weights_update_group", {"group_name": server.group})


@pytest.mark.parametrize("same", [False, True])
async def test_the_checker_compares_after_an_update_of_one_tensor(server: Server, same: bool) -> None:
    """From SGLang's tests of the checker over HTTP; comparing needs CUDA there."""
    if server.real or not server.compares:
        pytest.skip("it compares with no snapshot")
    group = await server.form()
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = server.tiny[0].get_parameter(name).data
    sent = tensor.clone() if same else torch.full_like(tensor, 0.75)
    assert (await server.ask("POST", "/weights_checker", {"action": "snapshot"}))[0] == 200
    before = (await server.ask("POST", "/weights_checker", {"action": "checksum"}))[1]["ranks"][0]["checksums"]
    await server.every("POST", "/begin_weight_update", {})
    body = described([(name, sent)]) | {"group_name": server.group, "flush_cache": True}
    told = asyncio.create_task(server.every("POST", "/update_weights_from_distributed", body))
    await asyncio.to_thread(broadcast, group, [sent])
    assert [status for status, _ in await told] == [200] * len(server.engines)
    assert [status for status, _ in await server.every("POST", "/end_weight_update", {})] == [200] * len(server.engines)
    status, compared = await server.ask("POST", "/weights_checker", {"action": "compare"})
    assert (status, compared["success"]) == ((200, True) if same else (400, False)), compared
    assert same or name in compared["message"]
    after = (await server.ask("POST", "/weights_checker", {"action": "checksum"}))[1]["ranks"][0]["checksums"]
    assert {each for each in before if before[each] != after[each]} == (set() if same else {name})
    await server.every("POST", "/destroy_weights_update_group", {"group_name": server.group})


async def test_the_checker(server: Server) -> None:
    status, told = await server.ask("POST", "/weights_checker", {"action": "checksum"})
    assert (status, told["success"]) == (200, True)
    assert len(told["ranks"]) == server.ranks[0]
    for number, rank in enumerate(told["ranks"]):
        assert len(rank["per_gpu_checksum"]) == 64
        (place,) = rank["parallelism_info"]
        sizes = {"tp_rank": number, "tp_size": server.ranks[0], "dp_size": 1, "pp_size": 1, "size": server.ranks[0]}
        assert {name: place[name] for name in sizes} == sizes
        assert rank["checksums"]
    assert told["per_engine_checksum"]
    status, again = await server.ask("GET", "/weights_checker")
    assert (status, again["per_engine_checksum"]) == (200, told["per_engine_checksum"])
    assert (await server.ask("POST", "/weights_checker", {"action": "bogus"}))[0] == 400
    if server.real:
        return  # compare needs CUDA there
    for action in ("snapshot", "compare"):
        status, told = await server.ask("POST", "/weights_checker", {"action": action})
        assert (status == 200, told["success"]) == (server.compares, server.compares), told


# Weights.


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_rows_of_a_tensor_by_its_name(server: Server, method: str, tmp_path: Path) -> None:
    """In the way of SGLang's own tests of weight updates."""
    path = "/get_weights_by_name"

    async def read_as(model: Any) -> None:
        for name, tensor in model.state_dict().items():
            for engine in range(len(server.engines)):
                told = await server.ask(method, path, {"name": name, "truncate_size": 3}, engine=engine)
                assert told == (200, tensor[:3].tolist()), name

    await read_as(server.tiny[0])
    first = server.tiny[0].model.embed_tokens.weight.tolist()
    status, told = await server.ask(method, path, {"name": "model.embed_tokens.weight"})
    assert (status, told[: len(first)]) == (200, first)
    assert len(told) == len(first) or server.real, "SGLang returns the rows that it pads with"
    other = changed(server.tiny[0], 17)
    other.save_pretrained(tmp_path / "other")
    disk = {"model_path": str(tmp_path / "other"), "weight_version": "other"}
    await server.every("POST", "/update_weights_from_disk", disk)
    await read_as(other)
    for body in ({"name": "model.nothing.weight"}, {"truncate_size": 3}, {"name": 3}):
        status, told = await server.ask(method, path, body)
        assert status == 400, told
    if not server.real:
        status, told = await server.ask(method, path, {"name": "model.nothing.weight"})
        assert (told["error"]["reason"], told["error"]["field"]) == ("FIELD_INVALID", "name"), told
        status, told = await server.ask(method, path, {"name": "lm_head.weight", "truncate_size": 0})
        assert (status, told["error"]["field"]) == (400, "truncate_size"), told
        name = {"name": "model.layers.1.mlp.down_proj.weight", "truncate_size": 2}
        assert await server.ask(method, path, name, at=server.root) == (
            200,
            other.model.layers[1].mlp.down_proj.weight[:2].tolist(),
        )


async def test_from_disk(server: Server, tmp_path: Path) -> None:
    model = changed(server.tiny[0], seed=1, scale=0.3)
    model.save_pretrained(tmp_path / "saved")
    body = {"model_path": str(tmp_path / "saved"), "weight_version": "from-disk"}
    for status, told in await server.every("POST", "/update_weights_from_disk", body):
        assert (status, told["success"], told["num_paused_requests"]) == (200, True, 0)
    assert await server.version() == {"from-disk"}
    assert await server.greedy(0) == greedy(model, PROMPT, 6)
    missing = {"model_path": str(tmp_path / "nowhere")}
    status, told = await server.ask("POST", "/update_weights_from_disk", missing)
    assert (status, told["success"]) == (400, False)
    assert (await server.ask("POST", "/update_weights_from_disk", {}))[0] == 400
    assert await server.greedy(0) == greedy(model, PROMPT, 6), "what is refused leaves the weights alone"


def running(server: Server, tokens: int = TOKENS) -> asyncio.Task[Answer]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
    return asyncio.create_task(server.ask("POST", "/generate", body))


async def begun(server: Server, engine: int = 0) -> None:
    """Wait until a request runs at the engine."""
    async with asyncio.timeout(30):
        while True:
            _, told = await server.ask("GET", "/v1/loads?include=core", engine=engine)
            if told["loads"][0]["num_running_reqs"]:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_requests_that_a_pause_stopped_go_on_with_the_new_weights(
    server: Server, mode: str, tmp_path: Path
) -> None:
    """From SGLang's tests of non-blocking updates, and of spans of weight versions."""
    [before] = await server.version()
    changed(server.tiny[0], seed=8, scale=0.3).save_pretrained(tmp_path / "saved")
    requests = [running(server) for _ in range(2)]
    await begun(server)
    await server.every("POST", "/pause_generation", {"mode": mode})
    body = {"model_path": str(tmp_path / "saved"), "weight_version": f"v-{mode}", "flush_cache": mode == "retract"}
    for status, told in await server.every("POST", "/update_weights_from_disk", body):
        assert (status, told["success"]) == (200, True), told
    await server.every("POST", "/continue_generation", {})
    for status, told in await asyncio.gather(*requests):
        meta = told["meta_info"]
        assert (status, meta["finish_reason"]["type"], meta["completion_tokens"]) == (200, "length", TOKENS)
        spans = meta["weight_versions"]
        assert [span["version"] for span in spans] == [before, f"v-{mode}"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], TOKENS)
        assert meta["weight_version"] == f"v-{mode}"
    _, told = await server.ask("GET", "/get_model_info")
    assert told["model_path"] == str(tmp_path / "saved")


async def test_an_update_that_aborts_ends_the_requests(server: Server, tmp_path: Path) -> None:
    server.tiny[0].save_pretrained(tmp_path / "saved")
    request = running(server, 2 * TOKENS)
    await begun(server)
    body = {"model_path": str(tmp_path / "saved"), "abort_all_requests": True, "weight_version": "aborting"}
    for status, told in await server.every("POST", "/update_weights_from_disk", body):
        assert (status, told["success"]) == (200, True), told
    status, told = await request
    assert (status, told["meta_info"]["finish_reason"]["type"]) == (200, "abort")


async def test_a_new_name_of_the_weights_under_a_pause(server: Server) -> None:
    """A frozen request has the new name from its next token on; the present name changes nothing.

    A stage of an SGLang server gives all tokens of the version the new name: the server's own label stays.
    """
    [before] = await server.version()
    for name, spans in ((before, [before]), ("renamed", [before, "renamed"])):
        request = running(server)
        await begun(server)
        await server.every("POST", "/pause_generation", {"mode": "in_place"})
        body = {"new_version": name, "abort_all_requests": False}
        for status, told in await server.every("POST", "/update_weight_version", body):
            assert (status, told["success"], told["new_version"]) == (200, True, name), told
        await server.every("POST", "/continue_generation", {})
        _, told = await request
        assert told["meta_info"]["finish_reason"]["type"] == "length"
        names = [span["version"] for span in told["meta_info"]["weight_versions"]]
        assert names == (spans if server.splits_renames else spans[-1:]), names
        assert await server.version() == {name}


async def test_an_update_without_a_name(server: Server, tmp_path: Path) -> None:
    """SGLang keeps the old name; a fleet's versions have their own names."""
    before = await server.version()
    server.tiny[0].save_pretrained(tmp_path / "saved")
    body = {"model_path": str(tmp_path / "saved")}
    for status, told in await server.every("POST", "/update_weights_from_disk", body):
        assert (status, told["success"]) == (200, True), told
    after = await server.version()
    assert len(after) == 1
    assert (after == before) == server.real


async def test_openais_answer_names_the_weights_of_the_first_choice(server: Server) -> None:
    body = {"model": str(server.tiny[1]), "prompt": "1+2", "max_tokens": 4, "n": 2, "ignore_eos": True}
    status, told = await server.ask("POST", "/v1/completions", body)
    assert (status, len(told["choices"])) == (200, 2), told
    [version] = await server.version()
    assert told["metadata"]["weight_version"] == version
    assert told["metadata"]["weight_versions"] == [{"version": version, "start": 0, "end": 4}]


async def test_an_update_in_a_session(server: Server) -> None:
    await server.every("POST", "/flush_cache")  # the buckets keep the KV cache, with entries of earlier tests
    group = await server.form()
    model = changed(server.tiny[0], seed=2, scale=0.3)
    await server.every("POST", "/pause_generation", {"mode": "retract"})
    for status, told in await server.every("POST", "/begin_weight_update", {"selector": "all"}):
        assert (status, told["success"]) == (200, True)
    await server.send(group, model, weight_version="step-1")
    for status, told in await server.every("POST", "/end_weight_update", {}):
        assert (status, told["success"]) == (200, True), told
    assert await server.version() == {"step-1"}
    for status, told in await server.every("POST", "/update_weight_version", {"new_version": "step-1b"}):
        assert (status, told["new_version"]) == (200, "step-1b")
    await server.every("POST", "/continue_generation", {})
    assert await server.version() == {"step-1b"}
    for engine in range(len(server.engines)):
        assert await server.greedy(engine) == greedy(model, PROMPT, 6)
    for status, told in await server.every("POST", "/destroy_weights_update_group", {"group_name": server.group}):
        assert (status, told["success"]) == (200, True)
    status, told = await server.ask("POST", "/destroy_weights_update_group", {"group_name": server.group})
    assert (status, told["success"]) == (400, False)


async def test_an_update_without_a_session(server: Server) -> None:
    """SGLang 0.5.23 refuses the update; a fleet opens the update implicitly, and commits when generation continues."""
    group = await server.form()
    model = changed(server.tiny[0], seed=3, scale=0.3)
    await server.every("POST", "/pause_generation", {})
    if server.real:
        body = described(next(buckets(model))) | {"group_name": server.group}
        status, told = await server.ask("POST", "/update_weights_from_distributed", body)
        assert (status, told["success"]) == (400, False)
        assert "begin_weight_update" in told["message"]
    else:
        before = await server.version()
        await server.send(group, model, weight_version="step-2")
        assert "step-2" not in before | await server.version(), "published last, whatever a bucket says"
        for status, told in await server.every("POST", "/continue_generation", {}):
            assert (status, told["status"]) == (200, "ok")
        assert await server.version() == {"step-2"}
        assert await server.greedy(0) == greedy(model, PROMPT, 6)
    await server.every("POST", "/destroy_weights_update_group", {"group_name": server.group})


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
async def test_an_update_of_some_tensors_in_a_session(server: Server, mode: str, load_format: str | None) -> None:
    """From SGLang's own tests of non-blocking updates: one projection of some layers, while requests run."""
    await server.every("POST", "/flush_cache")
    group = await server.form()
    model, sent = copy.deepcopy(server.tiny[0]), []
    for name, tensor in model.named_parameters():
        if name.endswith("mlp.up_proj.weight"):
            tensor.data.fill_(0.75)
            sent.append((name, tensor.data))
    requests = [running(server) for _ in range(2)]
    await begun(server)
    await server.every("POST", "/pause_generation", {"mode": mode})
    assert [status for status, _ in await server.every("POST", "/begin_weight_update", {})] == [200] * len(
        server.engines
    )
    body = described(sent) | {
        "group_name": server.group,
        "load_format": load_format,
        "flush_cache": mode == "retract",
        "weight_version": f"part-{mode}",
    }
    told = asyncio.create_task(server.every("POST", "/update_weights_from_distributed", body))
    tensors = [tensor for _, tensor in sent]
    flat = [torch.cat([tensor.flatten() for tensor in tensors])] if load_format else tensors
    await asyncio.to_thread(broadcast, group, flat)
    for status, answer in await told:
        assert (status, answer["success"]) == (200, True), answer
    for path in ("/end_weight_update", "/continue_generation"):
        assert [status for status, _ in await server.every("POST", path, {})] == [200] * len(server.engines), path
    for status, answer in await asyncio.gather(*requests):
        assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "length")
    assert await server.version() == {f"part-{mode}"}
    await server.every("POST", "/flush_cache")
    for engine in range(len(server.engines)):
        for name, tensor in (*sent[:3], ("model.norm.weight", model.model.norm.weight)):
            rows = await server.ask("POST", "/get_weights_by_name", {"name": name, "truncate_size": 3}, engine=engine)
            assert rows == (200, tensor[:3].tolist()), name
        assert await server.greedy(engine) == greedy(model, PROMPT, 6)
    if not server.real:
        _, checked = await server.ask("POST", "/weights_checker", {}, at=server.root)
        assert set(checked["model_digest"].values()) == {rlctl.model_digest(model)}
    await server.every("POST", "/destroy_weights_update_group", {"group_name": server.group})


@pytest.mark.parametrize("begun_by", ["a begin", "a write"])
async def test_half_of_an_update_is_not_served(server: Server, begun_by: str) -> None:
    """SGLang would generate with a mixture; a fleet refuses to continue until a full update."""
    if server.real:
        pytest.skip("SGLang serves the mixture")
    group = await server.form()
    before = await server.version()
    await server.every("POST", "/pause_generation", {})
    if begun_by == "a begin":
        await server.every("POST", "/begin_weight_update", {})
    bucket = next(buckets(changed(server.tiny[0], seed=4, scale=0.3)))
    body = described(bucket) | {"group_name": server.group, "flush_cache": False, "weight_version": "half"}
    told = asyncio.create_task(server.every("POST", "/update_weights_from_distributed", body))
    await asyncio.to_thread(broadcast, group, [tensor for _, tensor in bucket])
    assert [status for status, _ in await told] == [200] * len(server.engines)
    for status, refused in await server.every("POST", "/continue_generation", {}):
        assert status == 400
        assert refused["error"]["reason"] in ("QUORUM_NOT_MET", "WEIGHTS_INCOMPLETE", "WEIGHTS_DIRTY")
    assert "half" not in before | await server.version()
    assert (await server.ask("GET", "/ready"))[0] == 503


@pytest.mark.parametrize("source", ["at the same address", "at another one", "beside the old one"])
async def test_a_trainer_that_was_started_anew_forms_its_group_again(server: Server, source: str) -> None:
    """SGLang refuses a known name, and the trainer waits; a fleet leaves the old group."""
    if server.real:
        pytest.skip("SGLang refuses it")
    world_size, name, port = 1 + sum(server.ranks), f"suite-{new_uuid7()}", free_port()
    model, old = changed(server.tiny[0], seed=6, scale=0.3), []
    for turn in range(2):
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        where = {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size, "backend": "gloo"}
        joining = functools.partial(join, name=name, rank=0, world_size=world_size, timeout_s=50)
        forming = asyncio.create_task(asyncio.to_thread(joining, ("127.0.0.1", port)))
        calls = (
            server.ask(
                "POST",
                "/init_weights_update_group",
                {**where, "group_name": name, "rank_offset": 1 + sum(server.ranks[:engine])},
                engine=engine,
            )
            for engine in range(len(server.engines))
        )
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * len(server.engines)
        group = await forming
        if turn == 0 and source == "beside the old one":
            old = [group, store]
        elif turn == 0:
            group.close()
        if source != "at the same address":
            port = free_port()
        if turn == 0:
            del store
    await server.every("POST", "/pause_generation", {})
    for bucket in buckets(model):
        body = described(bucket) | {"group_name": name, "flush_cache": False, "weight_version": "again"}
        told = asyncio.create_task(server.every("POST", "/update_weights_from_distributed", body))
        for _, tensor in bucket:
            await asyncio.to_thread(group.broadcast, tensor.contiguous())
        assert [status for status, _ in await told] == [200] * len(server.engines)
    await server.every("POST", "/continue_generation", {})
    assert await server.version() == {"again"}
    assert await server.greedy(0) == greedy(model, PROMPT, 6)
    await server.every("POST", "/destroy_weights_update_group", {"group_name": name})
    for each in [group, *old[:1]]:
        each.close()


async def test_a_group_of_another_size_than_the_fleet(server: Server) -> None:
    """SGLang waits for missing members; a fleet reports both numbers at once."""
    if server.real:
        pytest.skip("SGLang waits")
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 9, "backend": "gloo"}
    status, told = await server.ask("POST", "/init_weights_update_group", body)
    assert (status, told["success"]) == (400, False)
    assert (
        f"world_size is 9; one source and the ranks of {len(server.engines)} stages make {1 + sum(server.ranks)}"
        in told["message"]
    )
    assert told["error"]["field"] == "world_size"


async def test_lists_of_different_lengths(server: Server) -> None:
    body = {"names": ["a", "b"], "dtypes": ["float32"], "shapes": [[1], [1]], "group_name": "suite"}
    status, _ = await server.ask("POST", "/update_weights_from_distributed", body)
    assert status == 400
    status, _ = await server.ask("POST", "/update_weights_from_distributed", {"names": ["a"]})
    assert status == 400


async def test_tensors_as_pickles(server: Server) -> None:
    if server.real:
        pytest.skip("it ends SGLang")
    body = {"serialized_named_tensors": ["gASVAAAA"], "load_format": None}
    status, told = await server.ask("POST", "/update_weights_from_tensor", body)
    assert (status, told["success"], told["error"]["reason"]) == (400, False, "FIELD_INVALID")
    assert told["error"]["field"] == "serialized_named_tensors[0]"


async def test_a_key_makes_a_repeat_exact(server: Server, tmp_path: Path) -> None:
    if server.real:
        pytest.skip("SGLang has no keys")
    changed(server.tiny[0], seed=5, scale=0.3).save_pretrained(tmp_path / "saved")
    body = {"model_path": str(tmp_path / "saved"), "weight_version": "keyed"}
    key = {"Idempotency-Key": "the fifth"}
    first = await server.ask("POST", "/update_weights_from_disk", body, **key)
    second = await server.ask("POST", "/update_weights_from_disk", body, **key)
    assert first == second
    status, told = await server.ask("POST", "/update_weights_from_disk", body | {"weight_version": "other"}, **key)
    assert (status, told["error"]["reason"]) == (400, "REQUEST_ID_REUSED")


async def test_an_engine_that_is_not_there(server: Server) -> None:
    if server.real:
        pytest.skip("a server is one engine")
    for method, path, body in (
        ("POST", "/pause_generation", {}),
        ("GET", "/model_info", None),
        ("GET", "/health", None),
    ):
        status, told = await server.ask(method, path, body, at=f"{server.root}/engines/nobody")
        assert (status, told["error"]["reason"]) == (404, "STAGE_NOT_FOUND")


async def test_the_fleet_at_the_root_is_one_server(server: Server, tmp_path: Path) -> None:
    if server.real:
        pytest.skip("a server is one engine")
    root = {"at": server.root}
    model = changed(server.tiny[0], seed=6, scale=0.3)
    model.save_pretrained(tmp_path / "saved")
    body = {"model_path": str(tmp_path / "saved"), "weight_version": "at-the-root"}
    assert (await server.ask("POST", "/update_weights_from_disk", body, **root))[0] == 200
    assert (await server.ask("GET", "/get_weight_version", **root))[1]["weight_version"] == "at-the-root"
    assert len((await server.ask("GET", "/v1/loads", **root))[1]["loads"]) == len(server.engines)
    digests = (await server.ask("POST", "/weights_checker", {}, **root))[1]["model_digest"]
    assert len(digests) == len(server.engines)
    assert len(set(digests.values())) == 1
    assert (await server.ask("GET", "/health", **root))[0] == 200
