"""Other projects' clients, unmodified, in processes of their own against a gateway: what they get to generate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from client_bodies import IDS, SENT
from http_calls import post
from yarl import URL

from rlctl.demo.tiny import encode
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.server import GatewayConfig, GatewayServer

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / "examples" / "integrations"
SUPPORT = ROOT / "tests" / "support"
TRL = str(SUPPORT / "trl_client.py")
STAND_INS = ROOT / "engines" / "rlctl_sglang" / "cpu"
"""Stand-ins for packages without which SGLang cannot be imported."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
LONG = 400
TRIES = 10
"""Tries of a loop with an abort: a request may not have begun at the engine then, or have ended."""

IDLE_S = 20.0


def fetched(client: str) -> Path:
    """Return the directory of a client's files. Skips the test if ``tools/clients`` has not fetched it."""
    path = ROOT / ".clients" / client
    if not path.exists():
        pytest.skip("tools/clients fetches it")
    return path


async def run(*command: str, clients: Path | str, **environment: str) -> list[Any]:
    """Run a script that prints lines of JSON, and return these."""
    script = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "PYTHONPATH": str(clients), **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await script.communicate()
    assert script.returncode == 0
    return [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]


@contextlib.asynccontextmanager
async def gateway(coordinator: str, dialect: str, tokenizer: str) -> AsyncIterator[str]:
    """Yield the URL of a gateway."""
    config = GatewayConfig(coordinator, dialect, generation=Settings(timeout_s=60.0, tokenizer=tokenizer), drain_s=5.0)
    server = GatewayServer(config)
    try:
        await server.start()
        yield f"http://{server.address}"
    finally:
        await server.stop()


async def trl_generates(url: str, world_size: int) -> None:
    """Run TRL 1.16.0's client, with the cases of TRL's own tests (``tests/test_vllm_client_server.py``)."""
    clients = fetched("trl==1.16.0")
    told = await run(sys.executable, TRL, url, "0", clients=f"{clients}{os.pathsep}{ROOT}")
    generated, chat, sequence, world, *own = told
    assert [len(ids) for ids in generated["completion_ids"]] == [4] * 4
    assert [len(logprobs) for logprobs in generated["logprobs"]] == [4] * 4
    assert generated["prompt_ids"][0] == generated["prompt_ids"][1]
    assert (len(chat["prompt_ids"]), len(chat["completion_ids"])) == (1, 2)
    assert [len(entries) for entries in sequence["logprobs"][0]] == [3] * len(sequence["logprobs"][0])
    assert sequence["actual_token_ids"]
    assert world["size"] == world_size
    texts, no_logprobs, chat_without, with_settings, several = own
    assert [len(texts[key]) for key in ("prompt_ids", "completion_ids", "logprobs")] == [2, 2, 2]
    assert all(isinstance(token, int) for ids in (*texts["prompt_ids"], *texts["completion_ids"]) for token in ids)
    for each in (no_logprobs, chat_without):
        assert (each["logprobs"], each["logprob_token_ids"], len(each["completion_ids"])) == (None, None, 1)
    assert len(with_settings["completion_ids"]) == 4
    assert all(len(ids) <= 32 for ids in with_settings["completion_ids"])
    for ids, logprobs, tokens in zip(
        several["completion_ids"], several["logprobs"], several["logprob_token_ids"], strict=True
    ):
        assert len(ids) == len(logprobs) == len(tokens)
        for token, among, each in zip(ids, tokens, logprobs, strict=True):
            assert token in among
            assert 5 <= len(each) <= 6
            assert each == sorted(each, reverse=True)


async def skyrl_updates(url: str, coordinator: str, checkpoint: Path, *arguments: str) -> None:
    """Run SkyRL 0.3.0's client over two updates of its own."""
    clients = fetched("skyrl==0.3.0")
    steps = await run(
        *(sys.executable, str(INTEGRATIONS / "skyrl" / "client.py"), f"--model={checkpoint}"),
        *(f"--proxy={url}", f"--coordinator={coordinator}", *arguments),
        clients=clients,
    )
    assert len({step["model_digest"] for step in steps}) == 2
    assert [(step["lengths"], step["stop_reasons"]) for step in steps] == [([60, 60], ["length"] * 2)] * 2


async def skyrl_generates(url: str) -> None:
    """Run every call of SkyRL 0.3.0's client that generates, and its loop after an abort."""
    clients = fetched("skyrl==0.3.0")
    told = await run(
        *(sys.executable, str(SUPPORT / "skyrl_client.py"), url),
        clients=f"{clients}{os.pathsep}{ROOT}",
    )
    calls = {each.pop("call"): each for each in told}
    generated = calls["generate"]
    assert list(map(len, generated["response_ids"])) == list(map(len, generated["response_logprobs"])) == [6, 6]
    assert generated["responses"] == calls["detokenize"]["texts"]
    assert [len(sequence["tokens"]) for sequence in calls["sample"]["sequences"]] == [4, 4]
    assert len(calls["sample"]["prompt_logprobs"]) == len(encode("1+2="))
    assert calls["chat"]["choices"][0]["message"]["content"]
    assert len(calls["chat"]["choices"][0]["logprobs"]["content"]) == 5
    assert calls["render"]["token_ids"]
    assert calls["completion"]["choices"][0]["text"] == generated["responses"][0]
    assert calls["tokenize"]["tokens"][0][-4:] == encode("1+2=")[-4:]
    for loop in ("abort", "keep"):
        assert calls[loop]["tokens"] == calls["whole"]["tokens"], loop
    assert 0 < calls["abort"]["cut"] < LONG


async def openai_chats(url: str) -> None:
    """Run OpenAI's client: completions, chats and streams, by the example's own calls."""
    told = await run(sys.executable, str(INTEGRATIONS / "openai" / "chat.py"), f"--base-url={url}", clients=ROOT)
    calls = {each.pop("call"): each for each in told}
    completion, streamed = calls["completions"], calls["completions, streamed"]
    assert completion["text"] == streamed["text"]
    assert (completion["finish_reason"], len(completion["logprobs"])) == ("length", 6)
    assert completion["usage"]["completion_tokens"] == streamed["usage"]["completion_tokens"] == 6
    assert calls["chat, streamed"]["content"] == calls["chat"]["content"]
    assert len(calls["chat, two answers"]["contents"]) == 2


async def openai_leaves(url: str, at_engines: Callable[[], int]) -> None:
    """Close a stream of OpenAI's client, and let a request of its time out: both end at the engine."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        (model,) = [model.id async for model in client.models.list()]
        given: Any = {"model": model, "prompt": "1+2=", "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**given, stream=True)
        assert [len((await anext(stream)).choices) for _ in range(3)] == [1, 1, 1]
        assert await asyncio.to_thread(at_engines) == 1
        await stream.close()
        await _until_idle(at_engines)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3, max_retries=0).completions.create(**given)
        await _until_idle(at_engines)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(**{**given, "temperature": -1})


async def _until_idle(at_engines: Callable[[], int]) -> None:
    async with asyncio.timeout(IDLE_S):
        while await asyncio.to_thread(at_engines):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def verl_generates(url: str, python: str, checkpoint: Path) -> None:
    """Run verl 0.9.1's HTTP adapters for SGLang, with SGLang's Python, and a partial rollout by their abort."""
    file = fetched("verl==0.9.1") / "verl" / "workers" / "rollout" / "sglang_rollout" / "http_server_engine.py"
    host, _, port = url.removeprefix("http://").partition(":")
    told = await run(python, str(SUPPORT / "verl_client.py"), str(file), str(checkpoint), host, port, clients=STAND_INS)
    calls = {each["call"]: each["told"] for each in told}
    generated, scores = calls["generate"], calls["scores"]["meta_info"]
    assert len(generated["output_ids"]) == len(generated["meta_info"]["output_token_logprobs"]) == 6
    assert [each["meta_info"]["completion_tokens"] for each in calls["texts"]] == [6, 6]
    assert len(scores["input_token_logprobs"]) == len(scores["input_top_logprobs"]) == len(encode("1+2="))
    assert calls["abort"]["tokens"] == calls["abort"]["whole"]
    assert 0 < calls["abort"]["cut"] < LONG


async def slime_rolls_out(url: str) -> None:
    """Send slime's rollouts, abort them at every worker, and go on from their tokens, as its partial rollouts do."""
    (sent,) = (each for each in SENT if each.name == "slime-rollout")
    sampling = {**sent.body["sampling_params"], "temperature": 0.0, "ignore_eos": True}

    async def generate(http: aiohttp.ClientSession, tokens: list[int]) -> tuple[list[int], str]:
        """Return the tokens with the new ones."""
        count = LONG + len(IDS) - len(tokens)
        body = {**sent.body, "input_ids": tokens, "sampling_params": {**sampling, "max_new_tokens": count}}
        status, told = await post(http, body, sent.path, **sent.headers)
        assert status == 200, told
        meta = told["meta_info"]
        made = [token for _, token, *_ in meta["output_token_logprobs"]]
        assert len(made) == meta["completion_tokens"]
        assert meta["weight_version"]
        return tokens + made, meta["finish_reason"]["type"]

    async with aiohttp.ClientSession(url) as http:
        whole, _ = await generate(http, IDS)
        for _ in range(TRIES):
            asked = [asyncio.create_task(generate(http, IDS)) for _ in range(4)]
            await asyncio.sleep(0.3)
            async with http.get("/list_workers") as response:
                workers = (await response.json())["urls"]
            for worker in workers:
                async with http.post(URL(f"{worker}/abort_request"), json={"abort_all": True}) as response:
                    assert response.status == 200
            parts = await asyncio.gather(*asked)
            if all(reason == "abort" and len(tokens) > len(IDS) for tokens, reason in parts):
                break
        assert {reason for _, reason in parts} == {"abort"}
        ends = await asyncio.gather(*(generate(http, tokens) for tokens, _ in parts))
        assert ends == [(whole, "length")] * 4


async def miles_session(url: str) -> None:
    """Send what Miles's session server sends for an agent's turns: chats that build on the tokens before."""
    async with aiohttp.ClientSession(url) as http:
        await asyncio.gather(*(_miles_turns(http, number) for number in range(8)))


async def _miles_turns(http: aiohttp.ClientSession, number: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": str(number)}]
    ids = encode(str(number))
    for turn in range(3):
        choice = await miles_chat(http, messages, ids, f"session-{number}")
        made = [token for _, token, *_ in choice["meta_info"]["output_token_logprobs"]]
        assert choice["meta_info"]["prompt_tokens"] == len(ids)
        messages += [choice["message"], {"role": "user", "content": str(turn)}]
        ids = [*ids, *made, *encode(str(turn))]


async def miles_chat(
    http: aiohttp.ClientSession, messages: list[dict[str, Any]], ids: list[int], session: str
) -> dict[str, Any]:
    """Send one turn, and check what the session server reads of the answer."""
    body = {"messages": messages, "max_tokens": 8, "logprobs": True, "return_meta_info": True, "no_stop_trim": False}
    status, told = await post(
        http, {**body, "input_ids": ids}, "/v1/chat/completions", **{"X-SMG-Routing-Key": session}
    )
    assert status == 200, told
    choice: dict[str, Any]
    [choice] = told["choices"]
    meta = choice["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == told["usage"]["completion_tokens"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    return choice
