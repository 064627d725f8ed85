"""The decode check: decode and prefill give the same tokens the same log probabilities. Pure.

A digest verifies the bytes that ranks hold. A decode step may still compute with different values. Causes are a
captured CUDA graph that reads memory of earlier weights, a derived tensor that a load does not renew, or a kernel
layout that is right in only one of the passes. For the check the engine generates tokens greedily by decode steps, of
several batch sizes. The engine then scores the same tokens by prefill, with KV entries that the prefill computes. Both
passes read the same weights, so the log probabilities differ by rounding only.

The rounding depends on the model, the dtype and the kernels. The engine measures the rounding at its start, with the
weights of its checkpoint, and later allows :data:`MARGIN` times as much. A smaller difference passes. Weights that
differ from the served weights by less than rounding are therefore not detected at once; their difference grows with
each update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY
from rlctl.v1.verbs_pb2 import DecodeReport

OUTPUTS = (3, 3, 3, 3, 5, 5, 7, 11)
"""Tokens to generate, by sequence. Prefill computes the first. Sequences that start together decode in batches of 8, 8,
4, 4, 2, 2 and then 1.
"""

PROMPT_TOKENS = 16

TOP = 4
"""Number of most likely tokens compared at each position. The log probability of a nearly certain token hardly changes
with the weights; the log probabilities of less likely tokens do.
"""

Likely: TypeAlias = Mapping[int, float]
"""Log probabilities of the most likely tokens at one position, by token id."""

ATTEMPTS = 2
"""A difference must appear with the prompts of this many attempts. Stale weights differ with every prompt."""

MARGIN = 4.0

FLOORS = {"float32": 1e-4, "float64": 1e-4}
"""Least tolerance in nats, by the dtype of the engine's computation."""

FLOOR = 0.1
"""Least tolerance of other dtypes, in nats: a logit of 16 has 2**-3 between neighbours in bfloat16."""

MOST = 0.5
"""Largest tolerance, in nats. An engine that needs more makes no check, because the check would show nothing."""


INVENTED = "it was not started with its checkpoint's weights, so its rounding is not known"
"""Reason against a check at a server with invented weights."""


@dataclass(frozen=True)
class Calibration:
    """The measurement at the engine's start.

    Attributes:
        tolerance: largest difference that passes, in nats.
        seconds: duration of one check.
    """

    tolerance: float
    seconds: float


def calibration(measured: Sequence[DecodeReport], dtype: str, seconds: float) -> Calibration:
    """Return the calibration from the checks of an engine that computes in ``dtype``.

    Raises UNSUPPORTED if decode and prefill differ so much that a check would show nothing.
    """
    noise = max(report.difference for report in measured)
    if not MARGIN * noise <= MOST:
        raise Reason.UNSUPPORTED.error(
            f"decode and prefill differ by {noise:.3g} nats with the weights that it started with"
        )
    return Calibration(max(MARGIN * noise, FLOORS.get(dtype.removeprefix("torch."), FLOOR)), seconds)


def prompts(vocab_size: int, longest: int, attempt: int = 0) -> list[list[int]]:
    """Return a prompt for each entry of :data:`OUTPUTS`, for sequences of at most ``longest`` tokens.

    The token ids are spread over the lower half of the vocabulary: placeholders of pictures are in the upper half.
    Raises UNSUPPORTED if the outputs leave no room for a prompt.
    """
    length = min(PROMPT_TOKENS, longest - max(OUTPUTS))
    if length < 1:
        raise Reason.UNSUPPORTED.error(f"sequences of {longest} tokens are too short to compare decode with prefill")
    half = max(vocab_size // 2, 1)
    first = attempt * (len(OUTPUTS) + 1)  # different prompts also in a tiny vocabulary
    return [
        [((first + row) * 104729 + column * 7919 + 3) % half for column in range(length)] for row in range(len(OUTPUTS))
    ]


def compare(decoded: Sequence[Sequence[Likely]], prefilled: Sequence[Sequence[Likely]]) -> DecodeReport:
    """Compare the log probabilities of decoded positions, by sequence and position.

    Raises UNSUPPORTED without log probabilities.
    """
    if not all(decoded) or not all(prefilled):
        raise Reason.UNSUPPORTED.error("the engine gave no log probabilities of likely tokens")
    means = []
    for decoded_sequence, prefilled_sequence in zip(decoded, prefilled, strict=True):
        gaps = [
            _apart(decode_likely, prefill_likely)
            for decode_likely, prefill_likely in zip(decoded_sequence, prefilled_sequence, strict=True)
        ]
        means.append(sum(gaps) / len(gaps))
    return DecodeReport(sequences=len(means), tokens=sum(map(len, decoded)), difference=max(means))


def _apart(one: Likely, other: Likely) -> float:
    """Return the mean difference over the likely tokens of either pass; infinite without tokens, or for NaN.

    A token that is likely in only one pass is at most as likely as the last likely token of the other pass.
    """
    gaps = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    for likely, reference in ((one, other), (other, one)):
        gaps += [
            max(0.0, likely[token] - min(reference.values(), default=-math.inf)) for token in likely.keys() - reference
        ]
    mean = sum(gaps) / len(gaps) if gaps else math.inf
    return math.inf if math.isnan(mean) else mean


def differs(report: DecodeReport) -> bool:
    return not report.difference <= report.tolerance


def mismatch(report: DecodeReport) -> RlctlError:
    return Reason.DECODE_MISMATCH.error(
        f"decode and prefill differ by {report.difference:.3g} nats (tolerance {report.tolerance:.3g}): decode has "
        "other weights",
        metadata={"difference": f"{report.difference:.6g}", "tolerance": f"{report.tolerance:.6g}"},
        outcome=OUTCOME_DIRTY,
    )
