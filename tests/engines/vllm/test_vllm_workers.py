"""Who the ranks of a vLLM are, and whether what they hold is read back; without vLLM."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlctl_servers.ranks.protocol import PROTOCOL
from rlctl_servers.server.http import Answer
from rlctl_servers.updates.rank_calls import MOST_GATHERED
from rlctl_vllm.updates.worker_calls import Workers

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.verbs_pb2 import CheckReport, CheckWeightsRequest, CommitUpdateRequest, WeightsReport
from rlctl.weights.tensor.tensors import TensorMeta


class Ranks:
    """Each answers what it holds."""

    def __init__(self, *digests: str) -> None:
        self.digests = digests
        self.told: list[str] = []

    async def tell(self, _path: str, body: dict[str, Any], *, call: Call) -> Answer:
        assert call.deadline
        self.told.append(body["kwargs"]["verb"])
        if self.told[-1] == "Attach":
            size = len(self.digests)
            stores = [["10.0.0.1", 1234], *[None] * (size - 1)]
            said = [
                json.dumps({"protocol": PROTOCOL, "rank": rank, "size": size, "store": stores[rank]})
                for rank in range(size)
            ]
        else:
            request = json.loads(base64.b64decode(body["kwargs"]["request"]))
            assert request["store"] == ["10.0.0.1", 1234]
            digests = self.digests if request["digest"] else [""] * len(self.digests)
            said = [json.dumps({"digest": digest, "unstaged": ""}) for digest in digests]
        number = body["kwargs"]["number"]
        results = [{"number": number, "answer": base64.b64encode(each.encode()).decode()} for each in said]
        return Answer(200, {"results": results})


@pytest.mark.parametrize(
    ("digests", "elements", "read"),
    [
        (["d", "d"], 1000, "d"),
        (["d", "e"], 1000, ""),
        (["d", ""], 1000, ""),
        (["d", "d"], MOST_GATHERED + 1, ""),
        (["d"], MOST_GATHERED + 1, "d"),
    ],
    ids=["alike", "unlike", "not all", "too large to gather", "nothing to gather"],
)
async def test_what_ranks_hold_is_read_back_where_all_say_the_same(
    digests: list[str], elements: int, read: str
) -> None:
    ranks = Ranks(*digests)
    reference = {"w": TensorMeta("w", torch.float32, (elements,))}
    call = Call("c", asyncio.get_running_loop().time() + 5)
    workers = Workers(ranks)  # type: ignore[arg-type]
    found = await workers.attach(reference, "10.0.0.1", call)
    assert [rank["rank"] for rank in found] == list(range(len(digests)))
    assert (await workers.meet(found, reference, call)).digest == read


class OneFails:
    """Two ranks, of which the second refuses."""

    async def tell(self, _path: str, body: dict[str, Any], *, call: Call) -> Answer:
        assert call.deadline
        detail = Reason.MEMORY_RELEASED.error("no").detail().SerializeToString()
        refused = {"error": base64.b64encode(detail).decode(), "outcome": OUTCOME_REJECTED}
        number = body["kwargs"]["number"]
        return Answer(200, {"results": [{"number": number, "answer": ""}, {"number": number, **refused}]})


async def test_ranks_that_differ_leave_a_mixture_only_where_something_was_to_change() -> None:
    workers = Workers(OneFails())  # type: ignore[arg-type]
    call = Call("c", asyncio.get_running_loop().time() + 5)
    with pytest.raises(RlctlError) as raised:
        await workers.each("CommitUpdate", CommitUpdateRequest(), WeightsReport, call)
    assert raised.value.outcome == OUTCOME_DIRTY
    with pytest.raises(RlctlError) as raised:
        await workers.each("CheckWeights", CheckWeightsRequest(), CheckReport, call)
    assert (raised.value.reason, raised.value.outcome) == (Reason.MEMORY_RELEASED, OUTCOME_REJECTED)


class OutOfStep:
    """The second of two ranks answers what it was asked before: of a call of vLLM's own, or of another of these."""

    http = SimpleNamespace(product="vLLM")

    def __init__(self, before: Any) -> None:
        self.before = before
        self.errors: list[RlctlError] = []

    async def tell(self, _path: str, body: dict[str, Any], *, call: Call) -> Answer:
        assert call.deadline
        return Answer(200, {"results": [{"number": body["kwargs"]["number"], "answer": ""}, self.before]})

    def lost(self, error: RlctlError) -> RlctlError:
        self.errors.append(error)
        return error


@pytest.mark.parametrize("before", [None, {"number": "another", "answer": ""}, {"answer": ""}])
async def test_an_answer_to_an_earlier_call_is_none_and_the_server_is_given_up(before: Any) -> None:
    control = OutOfStep(before)
    call = Call("c", asyncio.get_running_loop().time() + 5)
    with pytest.raises(RlctlError) as raised:
        await Workers(control).each("CommitUpdate", CommitUpdateRequest(), WeightsReport, call)  # type: ignore[arg-type]
    assert (raised.value.reason, raised.value.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)
    assert control.errors == [raised.value]
