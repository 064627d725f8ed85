"""OpenAI's own client, unmodified, against a fleet behind rlctl's gateway: completions, chats, streams, sessions.

    pip install openai
    python examples/integrations/openai/chat.py --base-url http://127.0.0.1:8080

Prints one line of JSON for each call. What a rollout needs beside OpenAI's API comes by the client's own means: a
session and the least version by headers, token ids by a field that it passes on.
"""

from __future__ import annotations

import argparse
import json

from openai import BadRequestError, OpenAI


def main() -> None:
    """One call of each kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", required=True, help="the gateway")
    parser.add_argument("--api-key", default="EMPTY", help="the fleet's token, if it has one")
    parser.add_argument("--prompt", default="12+34=")
    arguments = parser.parse_args()
    client = OpenAI(base_url=f"{arguments.base_url}/v1", api_key=arguments.api_key, max_retries=0)
    [model] = [each.id for each in client.models.list()]

    def say(call: str, **told: object) -> None:
        print(json.dumps({"call": call, **told}), flush=True)

    say("models", model=model)
    completion = client.completions.create(
        model=model,
        prompt=arguments.prompt,
        max_tokens=6,
        temperature=0,
        logprobs=0,
        extra_headers={"X-Session-ID": "episode-1"},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    [choice] = completion.choices
    assert choice.logprobs is not None
    say(
        "completions",
        text=choice.text,
        finish_reason=choice.finish_reason,
        logprobs=choice.logprobs.token_logprobs,
        token_ids=choice.model_extra["token_ids"] if choice.model_extra else None,
        weight_version_seq=(completion.model_extra or {}).get("weight_version_seq"),
        usage=completion.usage.model_dump() if completion.usage else None,
    )
    stream = client.completions.create(
        model=model,
        prompt=arguments.prompt,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    parts = list(stream)
    say(
        "completions, streamed",
        text="".join(choice.text for part in parts for choice in part.choices),
        usage=parts[-1].usage.model_dump() if parts[-1].usage else None,
    )
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.prompt}],
        max_completion_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_headers={"X-RLCTL-Min-Version": "1"},
    )
    say("chat", content=answer.choices[0].message.content)
    several = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.prompt}],
        max_completion_tokens=6,
        temperature=1,
        n=2,
    )
    say("chat, two answers", contents=[choice.message.content for choice in several.choices])
    events = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.prompt}],
        max_completion_tokens=6,
        temperature=0,
        stream=True,
    )
    say("chat, streamed", content="".join(event.choices[0].delta.content or "" for event in events))
    try:
        client.completions.create(model=model, prompt=arguments.prompt, echo=True)
    except BadRequestError as error:
        say("an error", status=error.status_code, message=error.message)


if __name__ == "__main__":
    main()
