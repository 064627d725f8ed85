"""The decode check, computed beside the KV cache while no step runs; see :mod:`rlctl.contract.decode_check`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from rlctl.contract import decode_check
from rlctl.contract.decode_check import ATTEMPTS, OUTPUTS, TOP, Calibration, Likely
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import DecodeReport
from rlctl.weights.tensor.tensors import dtype_name
from rlctl_torch.rank import Rank
from rlctl_torch.steps.step_plan import Batch
from rlctl_torch.verbs.beside_cache import log_probabilities, within_memory

log = logging.getLogger(__name__)


def calibrate(rank: Rank) -> Calibration | None:
    """Measure difference and time of a check, all ranks together. Return None if decode cannot be compared."""
    try:
        reports = [_measure(rank, 0)]
        started = time.perf_counter()
        reports.append(_measure(rank, 1))
        return decode_check.calibration(reports, dtype_name(rank.model.dtype), time.perf_counter() - started)
    except RlctlError as error:
        if error.reason not in (Reason.UNSUPPORTED, Reason.MEMORY_FULL):
            raise
        log.warning("decode checks are off: %s", error.message)
        return None


def check_decode(rank: Rank) -> DecodeReport:
    """Compare decode with prefill, all ranks together and with the same result. Raises DECODE_MISMATCH, MEMORY_FULL."""
    assert rank.calibration is not None
    for attempt in range(ATTEMPTS):
        report = _measure(rank, attempt)
        report.tolerance = rank.calibration.tolerance
        if not decode_check.differs(report):
            break
    else:
        raise decode_check.mismatch(report)
    return report


@torch.inference_mode()
def _measure(rank: Rank, attempt: int) -> DecodeReport:
    prompts = decode_check.prompts(rank.model.vocab_size, rank.longest, attempt)
    by_decode = [count - 1 for count in OUTPUTS]
    prefill = _Sequences(rank, len(prompts), len(prompts[0]) + max(by_decode))
    decode = _Sequences(rank, len(prompts), len(prompts[0]) + max(OUTPUTS))

    def compared() -> DecodeReport:
        outputs, decoded = _decode(decode, prompts)
        sequences = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, outputs, strict=True)]
        prefilled = [_likely(rows) for rows in torch.split(prefill.logprobs(sequences, by_decode), by_decode)]
        return _agreed(rank, decode_check.compare(decoded, prefilled))

    return within_memory(rank, lambda: prefill.rehearse(prompts, by_decode), compared)


def _agreed(rank: Rank, report: DecodeReport) -> DecodeReport:
    """Return the report with the largest difference, as each rank may compute the output head by itself."""
    with rank.ranks.exchanging() as exchange:
        reports = [DecodeReport.FromString(each) for each in exchange.all_gather_bytes(report.SerializeToString())]
    return max(reports, key=lambda each: each.difference)


def _likely(logprobs: torch.Tensor) -> list[Likely]:
    """Return the most likely tokens of each row of ``[positions, vocabulary]``."""
    values, tokens = logprobs.topk(min(TOP, logprobs.shape[-1]), dim=-1)
    return [dict(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


def _decode(sequences: _Sequences, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[Likely]]]:
    """Return greedy tokens after each prompt, and the likely tokens at the positions of decode steps."""
    outputs = [[token] for token in sequences.logprobs(prompts, [1] * len(prompts)).argmax(dim=-1).tolist()]
    decoded: list[list[Likely]] = [[] for _ in prompts]
    while running := [row for row, tokens in enumerate(outputs) if len(tokens) < OUTPUTS[row]]:
        logprobs = sequences.logprobs([outputs[row][-1:] for row in running], [1] * len(running), running)
        for row, token, likely in zip(running, logprobs.argmax(dim=-1).tolist(), _likely(logprobs), strict=True):
            outputs[row].append(token)
            decoded[row].append(likely)
    return outputs, decoded


class _Sequences:
    """Sequences with KV entries of their own, each of at most ``longest`` tokens."""

    def __init__(self, rank: Rank, count: int, longest: int) -> None:
        self._rank = rank
        rank.ranks.agree(lambda: self._allocate(longest, count))
        self._slots = [range(1 + row * longest, 1 + (row + 1) * longest) for row in range(count)]
        self._lengths = [0] * count

    def _allocate(self, longest: int, count: int) -> None:
        self._cache = self._rank.cache.alike(longest, count)

    def logprobs(
        self, tokens: Sequence[Sequence[int]], last: Sequence[int], rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Compute the next tokens of the sequences ``rows`` (None: all) in one pass.

        Returns log probabilities ``[sum(last), vocabulary]``, float32, after the ``last`` tokens of each sequence.
        """
        rows = range(len(tokens)) if rows is None else rows
        batch = self._batch(tokens, last, rows)
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._lengths[row] += len(row_tokens)
        return log_probabilities(self._rank, self._cache, batch)

    def rehearse(self, prompts: Sequence[Sequence[int]], last: Sequence[int]) -> None:
        """Compute a pass of prompts and ``last`` tokens after each. The sequences stay as they are."""
        tokens = [[*prompt, *[0] * count] for prompt, count in zip(prompts, last, strict=True)]
        log_probabilities(self._rank, self._cache, self._batch(tokens, last, range(len(tokens))))

    def _batch(self, tokens: Sequence[Sequence[int]], last: Sequence[int], rows: Sequence[int]) -> Batch:
        batch = Batch(list(rows), [], [], [], [], [])
        for row, row_tokens, output_count in zip(rows, tokens, last, strict=True):
            start = self._lengths[row]
            batch.starts.append(start)
            batch.lengths.append(len(row_tokens))
            batch.tokens.extend(row_tokens)
            batch.slots.extend(self._slots[row][start : start + len(row_tokens)])
            batch.outputs.extend(range(len(batch.tokens) - output_count, len(batch.tokens)))
        return batch
