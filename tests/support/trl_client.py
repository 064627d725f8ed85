"""TRL's VLLMClient, unmodified: ``trl_client.py URL``. One line of JSON for each of its calls that generate.

It wants vLLM beside it, which only its updates use.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from trl.generation import vllm_client  # type: ignore[import-not-found]

from rlctl.demo.tiny import encode

CHAT = [{"role": "user", "content": "1+2"}]


def add(a: int) -> int:
    """Adds.

    Args:
        a: A number.
    """
    return a


def say(call: str, told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"call": call, **told}) + "\n")


def main() -> None:
    vllm_client.is_vllm_available = lambda *_, **__: True
    client = vllm_client.VLLMClient(base_url=sys.argv[1], connection_timeout=10.0)
    prompt = encode("1+2=")
    say("generate", client.generate([prompt, prompt], n=2, max_tokens=4, generation_kwargs={"ignore_eos": True}))
    say("chat", client.chat([CHAT], n=2, max_tokens=4, tools=[add]))
    say("sequence", client.get_sequence_logprobs([prompt], [2], top_logprobs=3, temperature=1.0))
    say("world", {"size": client.get_world_size(), "info": client.get_server_info()})
    client.reset_prefix_cache()


if __name__ == "__main__":
    main()
