"""verl's HTTP adapters for SGLang, unmodified: ``verl_client.py FILE CHECKPOINT HOST PORT``, with SGLang's Python.

One line of JSON for each of its calls. FILE is verl's module, which needs nothing else of verl.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from typing import Any

PROMPT = [1, 5, 14, 6, 15]
LONG = 400
TRIES = 10
"""A request may not have begun at the engine when the abort comes, or have ended."""


def say(call: str, told: Any) -> None:
    sys.stdout.write(json.dumps({"call": call, "told": told}) + "\n")
    sys.stdout.flush()


async def tokens(adapter: Any, prompt: list[int], count: int) -> tuple[list[int], str]:
    """Generate greedily. Return the tokens and the reason of their end."""
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    told = await adapter.async_generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)
    made = [token for _, token, _ in told["meta_info"]["output_token_logprobs"]]
    assert made == told["output_ids"]
    return made, told["meta_info"]["finish_reason"]["type"]


async def loop(adapter: Any) -> None:
    """Abort all requests, and go on from the tokens so far."""
    whole, _ = await tokens(adapter, PROMPT, LONG)
    for _ in range(TRIES):
        asked = asyncio.create_task(tokens(adapter, PROMPT, LONG))
        await asyncio.sleep(0.3)
        await adapter.abort_request(abort_all=True)
        part, reason = await asked
        if part and reason == "abort":
            break
    rest, _ = await tokens(adapter, PROMPT + part, LONG - len(part))
    say("abort", {"cut": len(part), "tokens": part + rest, "whole": whole})


def main() -> None:
    file, checkpoint, host, port = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("http_server_engine", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for adapter in (module.HttpServerAdapter, module.AsyncHttpServerAdapter):
        adapter.__abstractmethods__ = frozenset()  # SGLang 0.5.23's engine has methods that verl 0.9.1 does not know
    given = {"launch_server": False, "model_path": checkpoint, "host": host, "port": int(port), "device": "cpu"}
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    blocking = module.HttpServerAdapter(**given)
    say("generate", blocking.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True))
    say("texts", blocking.generate(prompt=["1+2=", "7+"], sampling_params=sampling))
    scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    say("scores", blocking.generate(input_ids=PROMPT, sampling_params={**sampling, "max_new_tokens": 1}, **scored))
    asyncio.run(loop(module.AsyncHttpServerAdapter(**given)))


if __name__ == "__main__":
    main()
