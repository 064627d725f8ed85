"""The decode check of engine servers: its measurement, and servers that cannot be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from rlctl_servers.engine import ServerEngine
from rlctl_servers.requests.limits import Limits
from rlctl_servers.requests.probe import Computed, Prober, Turn
from rlctl_servers.server.state import ServerState

from rlctl.contract.decode_check import FLOORS, OUTPUTS
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.v1.fleet_pb2 import Capabilities
from rlctl.v1.verbs_pb2 import CHECK_ACTION_DECODE, DecodeReport

LIMITS = Limits(vocab_size=100, context_length=64, longest_prompt=63, tokenizer=True)


class State(ServerState):
    product = "a server"


class Server(Prober):
    """A server whose next token is the sum of those before it. ``decoded``: what decode adds to log probabilities."""

    def __init__(self, decoded: float = 0.0, failure: Exception | None = None, missing: int = 0) -> None:
        requests: Any = SimpleNamespace(hold=lambda: None)
        super().__init__(Mock(), State(), requests, LIMITS, Turn())
        self.calls: list[str] = []
        self._decoded, self._failure, self._missing = decoded, failure, missing

    @property
    def stopped(self) -> bool:
        return True

    async def go_on(self, call: Call) -> None:
        self.calls.append("go on")

    async def stop_again(self, call: Call) -> None:
        self.calls.append("stop")

    async def compute(self, tokens: Sequence[int], count: int, call: Call, top: int = 0) -> Computed:
        if self._failure is not None:
            raise self._failure
        outputs: list[int] = []
        for _ in range(count - self._missing):
            outputs.append(sum([*tokens, *outputs]) % 100)
        text, first = [*tokens, *outputs], len(tokens)
        likely = [
            {text[place]: -0.1 + (self._decoded if place > first else 0.0), 99 - text[place]: -3.0}
            for place in range(1, len(text))
        ]
        return Computed(outputs, [each[text[place]] for place, each in enumerate(likely, 1)], likely)


def call() -> Call:
    return Call("c", asyncio.get_running_loop().time() + 10)


async def test_both_passes_are_compared_at_the_tokens_of_decode_steps_while_the_server_goes_on() -> None:
    server = Server()
    calibration = await server.calibrate("float32", call())
    assert calibration.tolerance == FLOORS["float32"]
    report = await server.check_decode(calibration, call())
    assert (report.sequences, report.tokens, report.difference) == (len(OUTPUTS), sum(OUTPUTS) - len(OUTPUTS), 0)
    assert server.calls == ["go on", "stop"]
    server._decoded = 0.01
    with pytest.raises(RlctlError) as caught:
        await server.check_decode(calibration, call())
    assert (caught.value.reason, caught.value.outcome) == (Reason.DECODE_MISMATCH, OUTCOME_DIRTY)
    assert server.calls == ["go on", "stop"] * 2, "it is paused again"


async def test_a_difference_must_be_found_with_the_prompts_of_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    calibration = await server.calibrate("float32", call())
    measure = server._measure

    async def once(attempt: int, call: Call) -> DecodeReport:
        server._decoded = 0.01 if attempt == 0 else 0.0
        return await measure(attempt, call)

    monkeypatch.setattr(server, "_measure", once)
    assert (await server.check_decode(calibration, call())).difference == 0


async def test_requests_that_were_ended_early_are_no_mismatch() -> None:
    server = Server(missing=1)
    with pytest.raises(RlctlError) as caught:
        await server.calibrate("float32", call())
    assert caught.value.reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("server", "why_not", "why"),
    [
        (Server(decoded=0.5), "", "with the weights that it started with"),
        (Server(failure=KeyError("prompt_logprobs")), "", "KeyError: 'prompt_logprobs'"),
        (Server(failure=Reason.ENGINE_FAILED.error("HTTP 400")), "", "HTTP 400"),
        (Server(), "it has other weights", "it has other weights"),
        (None, "its prompts do not come to all ranks", "its prompts do not come to all ranks"),
    ],
    ids=["too far apart", "an answer of another form", "a refusal", "no fit weights", "no probes"],
)
async def test_a_server_that_cannot_be_calibrated_starts_and_says_why_it_makes_no_check(
    server: Server | None, why_not: str, why: str
) -> None:
    facts = SimpleNamespace(no_decode_check=why_not)
    config = SimpleNamespace(dtype="float32")
    engine: Any = SimpleNamespace(_prober=server, _facts=facts, _config=config, _failure=None, _calibration=None)
    capabilities = Capabilities()
    await ServerEngine._calibrate(engine, capabilities, call())
    assert engine._calibration is None
    assert CHECK_ACTION_DECODE not in capabilities.check_actions
    assert not capabilities.HasField("decode_check_time")
    assert why in capabilities.unsupported["decode_check"]


async def test_a_server_that_has_ended_does_not_start() -> None:
    gone = Reason.ENGINE_FAILED.error("it has ended")
    engine: Any = SimpleNamespace(
        _prober=Server(failure=gone),
        _facts=SimpleNamespace(no_decode_check=""),
        _config=SimpleNamespace(dtype="float32"),
        _failure=gone,
    )
    with pytest.raises(RlctlError, match="it has ended"):
        await ServerEngine._calibrate(engine, Capabilities(), call())
