"""The radix middleware before engines that say what they are told to; a token is a character."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from http_calls import nested, post
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.demo.tiny import VOCABULARY
from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.gateway.radix.middleware import _parts
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

RADIX = ("rlctl.gateway.radix.middleware:RadixMiddleware",)


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(sign) for sign in text]


def decode(ids: Any) -> str:
    return "".join(VOCABULARY[token] for token in ids)


@pytest.fixture
def asked() -> list[str]:
    """The prompts that came to the engines."""
    return []


@pytest.fixture
def answering(
    fleet: InProcessFleet,
    make_gateway: Callable[..., Any],
    chat_model: str,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
) -> Callable[..., Any]:
    """``async with answering("7=", text="7", stop="=") as http``: all engines say this."""

    @asynccontextmanager
    async def make(tokens: str, text: str, **finish: Any) -> AsyncIterator[aiohttp.ClientSession]:
        async def generate(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
            asked.append(decode(request.input_ids.ids))
            sample = r.Sample(output_ids=encode(tokens), text=text)
            sample.output_logprobs.extend(r.TokenLogprob(token_id=token, logprob=-1) for token in encode(tokens))
            sample.finish_reason.CopyFrom(r.FinishReason(type=r.FINISH_TYPE_STOP, **finish))
            yield r.GenerateResponse(samples=[sample])

        for stage in fleet.stages.values():
            monkeypatch.setattr(stage._engine, "generate", generate)
        async with make_gateway(fleet, dialect="slime", middleware_paths=RADIX, tokenizer=chat_model) as (_, http):
            yield http

    return make


async def test_a_stop_that_is_left_out_of_the_text_is_not_told_twice(
    answering: Callable[..., Any], asked: list[str]
) -> None:
    async with answering("7=", "7", matched_string="=") as http:
        _, first = await post(http, {"text": "1+2"})
        await post(http, {"text": "1+2" + first["text"] + "=5"})
        await post(http, {"text": "1+2" + first["text"] + "+5"})
        assert asked[-3:] == ["1+2", "1+27=5", "1+27+5"]
        _, known = await post(http, {"text": "1+27"}, "/retrieve_from_text")
        assert decode(known["tokens"]) == "1+27"
        assert known["rollout_logp"] == [0.0, 0.0, 0.0, -1.0], "it was generated"
        _, known = await post(http, {"text": "1+27="}, "/retrieve_from_text")
        assert known["loss_mask"] == [0, 0, 0, 1, 1]


async def test_tokens_whose_version_was_not_heard_get_no_other_stages(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang and vLLM tell the versions with the end of a sample: a stage that fails before has told none."""

    async def generate(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        sample = r.Sample(text="7", output_ids=encode("7"))
        sample.output_logprobs.add(token_id=sample.output_ids[0], logprob=-1)
        if decode(request.input_ids.ids) == "1+2":
            yield r.GenerateResponse(samples=[sample])
            raise Reason.ENGINE_FAILED.error("the server is gone")
        sample.finish_reason.CopyFrom(r.FinishReason(type=r.FINISH_TYPE_LENGTH))
        sample.versions.add(version=WeightVersion(label="later", sequence=2), start=0, end=1)
        yield r.GenerateResponse(samples=[sample])

    for stage in fleet.stages.values():
        monkeypatch.setattr(stage._engine, "generate", generate)
    async with make_gateway(fleet, dialect="slime", middleware_paths=RADIX, tokenizer=chat_model) as (_, http):
        _, reply = await post(http, {"text": "1+2"})
        assert reply["text"] == "77", reply
        _, known = await post(http, {"text": "1+277"}, "/retrieve_from_text")
    assert known["loss_mask"] == [0, 0, 0, 1, 1]
    assert known["weight_versions"] == [None, None, None, None, "later"]


async def test_adapters_share_nothing(answering: Callable[..., Any]) -> None:
    async with answering("7", "7", matched_string="=") as http:
        await post(http, {"text": "1+2"})
        _, known = await post(http, {"text": "1+27", "lora_path": "math"}, "/retrieve_from_text")
        assert known["loss_mask"] == [0, 0, 0, 0]
        _, known = await post(http, {"text": "1+27"}, "/retrieve_from_text")
        assert known["loss_mask"] == [0, 0, 0, 1]


async def test_nothing_is_kept_of_adapters_that_there_are_not(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], chat_model: str, checkpoint: Callable[[str], str]
) -> None:
    """Some load one for every step, under its own name; and a name may be any text."""
    async with make_gateway(fleet, dialect="slime", middleware_paths=RADIX, tokenizer=chat_model) as (server, http):
        (radix,), view = server._middlewares, server.fleet._lines.view
        await server.fleet.models()  # from here on it is told of them
        for step in range(4):
            name = f"step-{step}"
            request = v.LoadAdapterRequest(name=name, path=checkpoint("lora"), version=name)
            assert (await fleet.stub.LoadAdapter(request)).state == OPERATION_STATE_OK
            await eventually(lambda name=name: name in [each.name for m in view.models for each in m.adapters])
            await post(http, {"text": "1+2", "lora_path": name, "sampling_params": {"max_new_tokens": 1}})
            assert ("actor", name) in radix._kept
            await post(http, {"text": "1+2", "lora_path": f"{step} is none"}, "/retrieve_from_text")
            assert (await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name=name))).state == OPERATION_STATE_OK
        assert list(radix._kept) == [("actor", "step-3")]


async def test_an_unknown_field_may_be_nested_as_without_the_middleware(answering: Callable[..., Any]) -> None:
    async with answering("7", "7") as http:
        status, reply = await post(http, {"text": "1+2", "custom": nested(300)})
        assert status == 200, reply


class Words(Tokenizer):
    """Tokens are words; the space before the first one is left out, as some tokenizers do."""

    def __init__(self) -> None:
        self.words = [" a", " b", " stop", " b stop", "<end>", " stop\n", "?"]

    def join(self, tokens: Any) -> str:
        return "".join(self.words[token] for token in tokens).removeprefix(" ")


STOP = {"type": "stop", "matched": "stop"}


@pytest.mark.parametrize(
    ("text", "ids", "finish", "parts"),
    [
        (" a b", [0, 1], {"type": "length", "length": 2}, [(" a b", 0, 2)]),
        (" a b stop", [0, 1, 2], STOP, [(" a b stop", 0, 3)]),
        (" a b", [0, 1, 4], {"type": "stop", "matched": 4}, [(" a b", 0, 2), ("<end>", 2, 3)]),
        (" a b", [0, 3], STOP, [(" a b stop", 0, 2)]),
        (" a b ", [0, 1, 5], STOP, [(" a b stop\n", 0, 3)]),
        ("", [4], {"type": "stop", "matched": 4}, [("<end>", 0, 1)]),
        (" a b", [0, 6, 4], {"type": "stop", "matched": 4}, [(None, 0, 3)]),
        ("", [], STOP, [("", 0, 0)]),
    ],
)
def test_what_was_left_out_of_a_text_is_found_in_its_tokens(text: str, ids: Any, finish: Any, parts: Any) -> None:
    assert _parts(text, ids, finish, Words()) == parts
