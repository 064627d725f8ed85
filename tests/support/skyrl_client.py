"""SkyRL's RemoteInferenceClient, unmodified: ``skyrl_client.py URL``. One line of JSON for each of its calls.

The loop after an abort is what its documentation of ``pause`` asks for: a new request from the accumulated tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from typing import Any

import typing_extensions

from rlctl.demo.tiny import encode

# skyrl 0.3.0 has pydantic look at typing.TypedDict, which it can from Python 3.12 on only.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # type: ignore[import-not-found]  # noqa: E402
    RemoteInferenceClient,
)

PROMPT = encode("1+2=")
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
LONG = 400
TRIES = 10
"""A request may not have begun at the engine when the pause comes, or have ended."""


def say(call: str, told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"call": call, **told}) + "\n")
    sys.stdout.flush()


async def tokens(client: Any, prompt: list[int], count: int) -> tuple[list[int], str]:
    """Generate greedily from one prompt. Return the tokens and the reason of their end."""
    told = await client.generate({"prompt_token_ids": [prompt], "sampling_params": {**GREEDY, "max_tokens": count}})
    return told["response_ids"][0], told["stop_reasons"][0]


async def generate(client: Any) -> None:
    """Run each call that generates once."""
    prompts = {"prompt_token_ids": [PROMPT, encode("7+")], "session_ids": ["one", "two"]}
    generated = await client.generate({**prompts, "sampling_params": {**GREEDY, "max_tokens": 6}})
    say("generate", {key: generated[key] for key in ("response_ids", "response_logprobs", "responses", "stop_reasons")})
    say("detokenize", {"texts": await client.detokenize(generated["response_ids"])})
    say("tokenize", {"tokens": await client.tokenize(["1+2="])})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    sampling = {"temperature": 1.0, "max_tokens": 4, "seed": 7}
    body = {"prompt": prompt, "num_samples": 2, "sampling_params": sampling, "include_prompt_logprobs": True}
    say("sample", await client.sample({"json": body}))
    messages = [{"role": "user", "content": "1+2"}]
    chat = {"messages": messages, "max_tokens": 5, "temperature": 0.0, "logprobs": True, "ignore_eos": True}
    say("chat", await client.chat_completion({"json": chat}))
    say("render", await client.render_chat_completion({"json": {"messages": messages}}))
    given = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    say("completion", await client.completion({"json": given}))


async def paused(client: Any, mode: str) -> tuple[list[int], str]:
    """Pause the servers while a request runs, and let them resume."""
    asked = asyncio.create_task(tokens(client, PROMPT, LONG))
    await asyncio.sleep(0.3)
    await client.pause(mode)
    await asyncio.sleep(0.2)
    await client.resume()
    return await asked


async def loops(client: Any) -> None:
    """Compare requests that a pause has met with a request without one."""
    whole, _ = await tokens(client, PROMPT, LONG)
    say("whole", {"tokens": whole})
    for _ in range(TRIES):
        part, reason = await paused(client, "abort")
        if part and reason == "abort":
            break
    rest, _ = await tokens(client, PROMPT + part, LONG - len(part))
    say("abort", {"tokens": part + rest, "cut": len(part)})
    say("keep", {"tokens": (await paused(client, "keep"))[0]})


async def main() -> None:
    client = RemoteInferenceClient(sys.argv[1], [sys.argv[1]], 1, model_name="actor")
    await generate(client)
    await loops(client)
    await client.teardown()


if __name__ == "__main__":
    asyncio.run(main())
