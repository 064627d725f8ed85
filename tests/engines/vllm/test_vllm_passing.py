"""What the data port reads and replaces in vLLM's bodies."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from typing import Any

import pytest
from passed_answers import answered
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.version_labels import Stamps
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.requests.passing import Reader
from rlctl_vllm.requests.requests import TokensInOut

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import HttpExchange, HttpRequest
from rlctl.runtime.http_client import Response
from rlctl.v1.verbs_pb2 import Adapter

OPEN = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/completions/render",
    "/v1/chat/completions/render",
)
HELD = "policy@2#01234567-1"


class Server:
    """Answers with the body that it got.

    Attributes:
        bodies: all bodies.
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def forward(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        del method, target, headers
        self.bodies.append(body)
        return answered(body, "application/json")


@pytest.fixture
def passing() -> Passing:
    table, stamps, limits = LoraTable(), Stamps("first"), Limits(100, 512, 500)
    table.put(Held(HELD, Adapter(name="policy", version="2"), 1, 1))
    http: Any = Server()
    reader = Reader(limits, "rlctl", lambda: ["/checkpoint"], table)
    return Passing(http, reader, Requests(TokensInOut(http, limits, stamps, table)), stamps, table)


def exchange(passing: Passing, path: str, document: Any, *, gated: bool) -> HttpExchange:
    return passing.read(HttpRequest("POST", path, (), json.dumps(document).encode(), document, gated))


async def body_of(exchange: HttpExchange) -> bytes:
    with closing(exchange):
        body = (await exchange.begin()).body
    assert body is not None
    return body


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize(
    ("model", "served", "of_fleet"),
    [
        ("default", "rlctl", ""),
        ("/checkpoint", "rlctl", ""),
        ("actor", "rlctl", "actor"),
        ("policy", HELD, ""),
        ("actor:policy", HELD, ""),
    ],
)
async def test_a_route_without_the_gate_takes_the_names_of_the_fleet(
    passing: Passing, path: str, model: str, served: str, of_fleet: str
) -> None:
    begun = exchange(passing, path, {"model": model, "prompt": "1"}, gated=False)
    assert begun.model == of_fleet
    answer = await body_of(begun)
    server: Any = passing.http
    assert [json.loads(body) for body in server.bodies] == [{"model": served, "prompt": "1"}]
    assert answer.endswith(b',"model":%b}' % json.dumps(model).encode())


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"prompt": "1", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "1", "echo": True, "logprobs": 1}, "echo"),
        ("/v1/completions", {"prompt": "1", "echo": True}, ""),
        ("/v1/completions", {"prompt": "1", "logprobs": 1, "prompt_logprobs": None}, ""),
        ("/v1/chat/completions", {"messages": [], "echo": True}, "echo"),
        ("/v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 2}, ""),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"prompt_logprobs": 2}}, "prompt_logprobs"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"prompt_logprob_token_ids": [2]}},
            "prompt_logprob_token_ids",
        ),
    ],
)
def test_log_probabilities_of_a_prompt_are_refused_where_they_end_the_server(
    passing: Passing, path: str, fields: dict[str, Any], field: str
) -> None:
    reader = Reader(Limits(100, 512, 500, no_prompt_logprobs="it ends"), "rlctl", list, passing.adapters)
    passing = dataclasses.replace(passing, reader=reader)
    if not field:
        assert exchange(passing, path, fields, gated=True)
        return
    with pytest.raises(RlctlError) as refused:
        exchange(passing, path, fields, gated=True)
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED, field)


@pytest.mark.parametrize("document", [{"prompt": "1"}, {"model": 1}, [1]])
async def test_a_body_without_a_name_is_passed_on_unchanged(passing: Passing, document: Any) -> None:
    assert await body_of(exchange(passing, "/tokenize", document, gated=False)) == json.dumps(document).encode()


async def test_an_answer_of_messages_has_the_callers_model_and_generated_versions(passing: Passing) -> None:
    """The input of a tool is JSON of the model, which may name a version."""
    document = {"model": "default", "content": [{"input": {"version": "first", "weight_version": "1@1"}}]}
    answer = await body_of(exchange(passing, "/v1/messages", document, gated=True))
    assert b'"input": {"version": "first", "weight_version": "1@1"}' in answer
    assert b'"model":"default"' in answer
    assert b'"model":"rlctl"' not in answer
