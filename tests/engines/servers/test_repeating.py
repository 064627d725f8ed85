"""The trial of loads at an engine's start, without a server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rlctl_servers.requests.limits import Limits
from rlctl_servers.requests.probe import Computed
from rlctl_servers.updates.reload_trial import RUNS, differing, prompt, trial

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_UNKNOWN

LIMITS = Limits(vocab_size=16, context_length=64, longest_prompt=63)


def runs(*offsets: float, tokens: Sequence[int] = (4, 5)) -> list[Computed]:
    """Runs of a prompt of three tokens."""
    return [Computed(tokens, [-1.0 + offset, -2.0 + offset, -0.5, -0.25]) for offset in offsets]


@pytest.mark.parametrize(
    ("before", "after", "repeats"),
    [
        (runs(0, 0, 0), runs(0, 0, 0), True),
        (runs(0, 0, 0), runs(0.04, 0.04, 0.04), False),
        (runs(0, 0.03, 0), runs(0.04, 0.04, 0.05), True),
        (runs(0, 0.01, 0), runs(0.04, 0.04, 0.05), False),
        (runs(0, 0, 0), runs(0, 0, 0, tokens=(4, 6)), False),
        (runs(0, 0) + runs(0, tokens=(4, 6)), runs(0, 0, 0, tokens=(4, 6)), True),
        (runs(float("nan")), runs(float("nan")), False),
        ([Computed([], [])], [Computed([], [])], False),
    ],
)
def test_a_load_repeats_when_it_differs_no_more_than_runs_do(
    before: list[Computed], after: list[Computed], repeats: bool
) -> None:
    assert (not differing(before, after)) is repeats


class Server:
    """Computes by its weights, which a load changes."""

    def __init__(self, error: RlctlError | None = None, *, at: int = -1, drift: float = 0.0) -> None:
        """``error``: raised by call number ``at``; ``drift``: what a load changes."""
        self.calls = 0
        self.loads = 0
        self._error, self._at, self._drift = error, at, drift

    def _call(self) -> None:
        self.calls += 1
        if self._error is not None and self.calls == self._at:
            raise self._error

    async def compute(self, tokens: Sequence[int], count: int) -> Computed:
        self._call()
        return Computed([1] * count, [self.loads * self._drift] * (len(tokens) - 1 + count))

    async def load(self) -> None:
        self._call()
        self.loads += 1


async def test_a_second_load_that_computes_the_same_passes() -> None:
    server = Server()
    assert await trial(LIMITS, server.compute, server.load) is None
    assert (server.calls, server.loads) == (2 * RUNS + 1, 1)


async def test_a_second_load_that_computes_something_else_is_named() -> None:
    server = Server(drift=0.5)
    refuted = await trial(LIMITS, server.compute, server.load)
    assert refuted is not None
    assert refuted.loaded
    assert "differ by 0.5" in refuted.why


async def test_a_load_that_fails_is_no_proof_and_a_server_without_outputs_is_left_alone() -> None:
    failed = await trial(LIMITS, *_at(RUNS + 1))
    assert failed is not None
    assert failed.loaded
    silent = await trial(LIMITS, *_at(1))
    assert silent is not None
    assert not silent.loaded


async def test_a_server_that_is_gone_ends_the_start() -> None:
    for error in (Reason.UNREACHABLE.error("gone"), Reason.ENGINE_FAILED.error("gone", outcome=OUTCOME_UNKNOWN)):
        with pytest.raises(RlctlError) as raised:
            await trial(LIMITS, *_at(RUNS + 1, error))
        assert raised.value is error


def _at(number: int, error: RlctlError | None = None) -> tuple:
    server = Server(error or Reason.ENGINE_FAILED.error("it does not fit", outcome=OUTCOME_DIRTY), at=number)
    return server.compute, server.load


@pytest.mark.parametrize(("vocabulary", "longest"), [(16, 63), (2, 20), (150_000, 4096), (16, 5)])
def test_the_prompt_fits_the_server(vocabulary: int, longest: int) -> None:
    ids = prompt(Limits(vocab_size=vocabulary, context_length=longest + 1, longest_prompt=longest))
    assert 1 <= len(ids) <= longest
    assert all(0 <= token < vocabulary for token in ids)


@pytest.mark.parametrize("wild", [(-5.0, -10.0, -1.0), (float("nan"), -1.0, -9.0), (-1.0, float("nan"), -9.0)])
def test_a_second_load_that_computes_something_else_every_time_is_no_noise(wild: tuple[float, ...]) -> None:
    before = [Computed([7], [-0.5, -0.5]) for _ in wild]
    after = [Computed([7], [value, -0.5]) for value in wild]
    assert "log probabilities of a prompt differ" in differing(before, after)
