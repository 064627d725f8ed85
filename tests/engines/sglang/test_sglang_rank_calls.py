"""What the answers of SGLang's route for checking weights mean, without a server."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from rlctl_servers.ranks.protocol import PROTOCOL
from rlctl_servers.server.http import Answer
from rlctl_sglang.updates.rank_calls import Ranks

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.verbs_pb2 import CheckReport, CheckWeightsRequest


class Server:
    """Answers as SGLang does; ``answers``: of its ranks."""

    def __init__(self, answer: Answer | None, *ranks: dict[str, Any]) -> None:
        self.answer = answer
        self.ranks = ranks

    async def tell(self, path: str, body: dict[str, Any], *, call: Call) -> Answer:
        assert (path, body["action"]) == ("/weights_checker", "rlctl")
        (arguments,) = body["skip_tensor_list"]
        number = json.loads(arguments)["number"]
        answers = [{"number": number, **rank} for rank in self.ranks]
        return self.answer or Answer(200, {"success": True, "message": json.dumps(answers)})

    def lost(self, error: RlctlError) -> RlctlError:
        return error


async def refused(server: Server, *, attaching: bool = False) -> RlctlError | None:
    control: Any = server
    call = Call("c", asyncio.get_running_loop().time() + 5)
    try:
        if attaching:
            assert await Ranks(control).attach({}, "127.0.0.1", call) == []
        else:
            await Ranks(control).each("CheckWeights", CheckWeightsRequest(), CheckReport, call)
    except RlctlError as error:
        return error
    return None


@pytest.mark.parametrize("status", [400, 404])
async def test_a_server_without_the_plug_in_has_no_ranks(status: int) -> None:
    message = "Unsupported action='rlctl'" if status == 400 else "Not Found"
    assert await refused(Server(Answer(status, {"message": message})), attaching=True) is None


@pytest.mark.parametrize(
    "answer",
    [
        Answer(401, {"error": "Unauthorized"}),
        Answer(400, {"message": "rlctl: RuntimeError: Connection closed by peer"}),
    ],
    ids=["key", "gathering"],
)
async def test_another_refusal_is_not_taken_for_a_missing_plug_in(answer: Answer) -> None:
    for attaching in (True, False):
        error = await refused(Server(answer), attaching=attaching)
        assert error is not None
        assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)


async def test_a_rank_whose_code_fails_is_an_error_of_unknown_outcome() -> None:
    error = await refused(Server(None, {"answer": ""}, {"failed": "ImportError: no protobuf"}))
    assert error is not None
    assert (error.reason, error.outcome) == (Reason.ENGINE_FAILED, OUTCOME_UNKNOWN)
    assert "no protobuf" in error.message


@pytest.mark.parametrize("versions", [(PROTOCOL, PROTOCOL + 1), (PROTOCOL - 1, PROTOCOL - 1), (None, None)])
async def test_ranks_with_a_plug_in_of_another_version_are_not_driven(versions: tuple[int | None, ...]) -> None:
    described = [
        {"rank": rank, "size": 2, "protocol": number, "rlctl": f"0.{number}"} for rank, number in enumerate(versions)
    ]
    answers = [{"answer": base64.b64encode(json.dumps(rank).encode()).decode()} for rank in described]
    error = await refused(Server(None, *answers), attaching=True)
    assert error is not None
    assert error.reason is Reason.UNSUPPORTED
    assert f"rlctl 0.{versions[-1]}" in error.message
    assert "start the engine again" in error.next_step


async def test_every_rank_answers() -> None:
    assert await refused(Server(None, {"answer": ""}, {"answer": ""})) is None
