"""What the demo's judge lets pass."""

from __future__ import annotations

import pytest

from rlctl.demo.judge import Judge, Step


def step(number: int, **changes: object) -> Step:
    good = {"digests": {"a": f"d{number}", "b": f"d{number}"}, "expected": f"d{number}", "max_logprob_diff": 1e-6}
    good |= {"contents": f"c{number}"}
    good |= {"verified": {"a": "expected", "b": "expected"}, "evidence": {"a": "rank", "b": "rank"}}
    return Step(number, **(good | changes))


def test_good_steps_and_a_rise_pass() -> None:
    judge = Judge()
    assert [judge.look(step(number)) for number in (1, 2)] == ["", ""]
    verdict = judge.verdict(0.5, 0.6)
    assert verdict.passed
    assert verdict.checksums_equal
    assert verdict.max_logprob_diff == 1e-6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"digests": {"a": "d2", "b": "old"}}, "weights of b are not the trainer's"),
        ({"digests": {}}, "every engine"),
        ({"contents": "c1"}, "did not change"),
        ({"verified": {"a": "expected", "b": "received"}}, "b was verified at level received, not expected"),
        ({"verified": {"a": "expected"}}, "b was verified at level none, not expected"),
        ({"evidence": {"a": "engine", "b": "rank"}}, "the digest of a has evidence engine, not rank"),
        ({"max_logprob_diff": 1e-4}, "log probabilities differ"),
        ({"max_logprob_diff": float("nan")}, "log probabilities differ"),
        ({"problem": "DIGEST_MISMATCH: x"}, "DIGEST_MISMATCH"),
        ({"staleness": 1}, "samples were 1 versions behind, above 0"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, object], named: str) -> None:
    judge = Judge()
    judge.look(step(1))
    assert named in judge.look(step(2, **changes))
    assert not judge.verdict(0.1, 0.9).passed


def test_without_a_rise_it_fails() -> None:
    judge = Judge()
    judge.look(step(1))
    verdict = judge.verdict(0.5, 0.59)
    assert not verdict.passed
    assert "greedy reward rose by 0.09" in verdict.problem


def test_without_a_step_nothing_was_equal() -> None:
    assert not Judge().verdict(0.1, 0.9).checksums_equal
