"""The comparison of decode with prefill: prompts, differences, tolerance."""

from __future__ import annotations

import math

import pytest

from rlctl.contract import decode_check
from rlctl.contract.decode_check import FLOOR, FLOORS, MARGIN, OUTPUTS, PROMPT_TOKENS
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.v1.verbs_pb2 import DecodeReport


def test_prompts_fit_beside_the_outputs_and_differ_between_attempts() -> None:
    first, second = (decode_check.prompts(50_000, 4096, attempt) for attempt in (0, 1))
    assert [len(prompt) for prompt in first] == [PROMPT_TOKENS] * len(OUTPUTS)
    assert len({tuple(prompt) for prompt in (*first, *second)}) == 2 * len(OUTPUTS)
    assert all(0 <= token < 25_000 for prompt in (*first, *second) for token in prompt)
    assert {len(prompt) for prompt in decode_check.prompts(16, max(OUTPUTS) + 2)} == {2}
    assert decode_check.prompts(1, 4096)[0] == [0] * PROMPT_TOKENS
    with pytest.raises(RlctlError, match="sequences of 11 tokens are too short") as caught:
        decode_check.prompts(16, max(OUTPUTS))
    assert caught.value.reason is Reason.UNSUPPORTED


def test_decode_steps_have_several_batch_sizes() -> None:
    sizes = [sum(count > step for count in OUTPUTS) for step in range(1, max(OUTPUTS))]
    assert sizes == [8, 8, 4, 4, 2, 2, 1, 1, 1, 1]


def test_the_sequence_that_differs_most_counts() -> None:
    decoded = [[{5: -1.0, 6: -3.0}, {5: -2.0, 7: -4.0}], [{5: -1.0}, {5: -1.0}]]
    prefilled = [[{5: -1.0, 6: -3.0}, {5: -2.5, 7: -4.5}], [{5: -1.0}, {5: -1.1}]]
    report = decode_check.compare(decoded, prefilled)
    assert (report.sequences, report.tokens) == (2, 4)
    assert report.difference == pytest.approx(0.25)


def test_a_token_that_is_likely_in_one_pass_only_counts_with_the_least_that_it_differs_by() -> None:
    decoded = {1: -0.001, 2: -8.0, 3: -8.5, 4: -9.0}
    prefilled = {1: -0.001, 5: -7.6, 6: -8.0, 7: -8.2}
    gaps = [0.0, 0.2, 0.0, 0.0, 1.4, 1.0, 0.8]
    report = decode_check.compare([[decoded]], [[prefilled]])
    assert report.difference == pytest.approx(sum(gaps) / len(gaps))
    near_tie = decode_check.compare([[{1: -0.5, 2: -3.0}]], [[{1: -0.5, 3: -3.0}]])
    assert near_tie.difference == 0, "the last places may change between equals"


def test_an_engine_without_log_probabilities_cannot_be_compared() -> None:
    with pytest.raises(RlctlError, match="no log probabilities") as caught:
        decode_check.compare([[{1: -1.0}], []], [[{1: -1.0}], []])
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("prefilled", [{5: math.nan}, {}], ids=["not a number", "none"])
def test_what_cannot_be_compared_differs(prefilled: dict[int, float]) -> None:
    decoded = [[{5: -1.0}], [{5: -1.0}]]
    assert decode_check.compare(decoded, [[{5: -1.0}], [prefilled]]).difference == math.inf
    assert decode_check.compare(decoded, [[prefilled], [{5: -1.0}]]).difference == math.inf


@pytest.mark.parametrize(
    ("noise", "dtype", "tolerance"),
    [
        (1e-6, "float32", FLOORS["float32"]),
        (1e-6, "torch.float32", FLOORS["float32"]),
        (1e-3, "float32", MARGIN * 1e-3),
        (1e-3, "bfloat16", FLOOR),
        (0.1, "torch.bfloat16", MARGIN * 0.1),
    ],
)
def test_the_tolerance_follows_the_measurement_at_the_start(noise: float, dtype: str, tolerance: float) -> None:
    measured = [DecodeReport(difference=noise / 2), DecodeReport(difference=noise)]
    found = decode_check.calibration(measured, dtype, 0.25)
    assert (found.tolerance, found.seconds) == (pytest.approx(tolerance), 0.25)


@pytest.mark.parametrize("noise", [0.13, math.inf, math.nan])
def test_an_engine_whose_passes_differ_at_the_start_is_not_calibrated(noise: float) -> None:
    with pytest.raises(RlctlError, match="with the weights that it started with") as caught:
        decode_check.calibration([DecodeReport(difference=noise)], "float32", 0.1)
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize(
    ("difference", "differs"), [(0.0, False), (0.1, False), (0.11, True), (math.inf, True), (math.nan, True)]
)
def test_what_is_above_the_tolerance_differs(difference: float, differs: bool) -> None:
    report = DecodeReport(difference=difference, tolerance=0.1)
    assert decode_check.differs(report) is differs
    error = decode_check.mismatch(report)
    assert (error.reason, error.outcome) == (Reason.DECODE_MISMATCH, OUTCOME_DIRTY)
