"""The limit of voluntary disruptions: its text, and its number of stages."""

from __future__ import annotations

import pytest

from rlctl.contract import min_healthy
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.fleet_pb2 import MinHealthy


@pytest.mark.parametrize(
    ("text", "minimum", "words"),
    [
        ("2", MinHealthy(stages=2), "2"),
        ("50%", MinHealthy(percent=50), "50%"),
        ("0", MinHealthy(), ""),
        ("0%", MinHealthy(), ""),
    ],
)
def test_a_limit_is_a_number_or_a_share(text: str, minimum: MinHealthy, words: str) -> None:
    assert min_healthy.parse(text) == minimum
    assert min_healthy.words(minimum) == words


@pytest.mark.parametrize("text", ["", "-1", "101%", "1.5", "50 %", "%", "٣", "99999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(RlctlError) as caught:
        min_healthy.parse(text, "limit")
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "limit")


@pytest.mark.parametrize(
    ("percent", "stages", "limit"), [(50, 3, 2), (50, 4, 2), (1, 100, 1), (1, 101, 2), (100, 7, 7)]
)
def test_a_share_is_rounded_up(percent: int, stages: int, limit: int) -> None:
    assert min_healthy.limit(MinHealthy(percent=percent), stages) == limit


def test_no_limit_is_zero() -> None:
    assert min_healthy.limit(MinHealthy(), 5) == 0
