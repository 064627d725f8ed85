"""The trial of loads at an engine's start: a second load of the checkpoint must compute the same values as the first.

A server loads weights at its start and again with every update. A step of the first load only, such as the packing of a
kernel's weights, leaves an update wrong although every byte has arrived. If parameters are read back as the engine
computes with them, each update proves itself. Otherwise the checkpoint is loaded a second time at the start, and log
probabilities and greedy tokens of a short prompt are compared. SGLang's ranks may find the places of a checkpoint's
elements by loading; that search is then the second load.

The trial loads equal weights. It does not show a load that leaves a derived value unchanged: a probe or the decode
check does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl_servers.requests.limits import Limits
from rlctl_servers.requests.probe import Computed
from rlctl_servers.updates.version_labels import TRYING

RUNS = 3
"""Runs of the prompt on each side: kernels that are not deterministic differ from run to run."""

TOLERANCE = 1e-4
"""Largest difference of log probabilities, beyond the difference of the runs before the second load."""

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 8


INVENTED = "it was not started with its checkpoint's safetensors files, so no second load was compared with the first"
"""Reason for a missing trial: the load format makes weights up, or reads other files."""


@dataclass(frozen=True)
class Refuted:
    """A failed or missing trial.

    Attributes:
        why: the reason.
        loaded: the second load was begun, so the weights are no longer the checkpoint's.
    """

    why: str
    loaded: bool


Compute = Callable[[Sequence[int], int], Awaitable[Computed]]
"""Computes a number of tokens after a prompt."""


def refuse_tried(label: str, product: str, url: str) -> None:
    """Raise ENGINE_FAILED for a server with the label of a trial that did not pass."""
    if label == TRYING:
        raise spoilt(Refuted("an earlier trial of it did not end, or did not pass", loaded=True), product, url)


def spoilt(refuted: Refuted, product: str, url: str) -> RlctlError:
    """Return the error for an attached server that did not pass the trial: its weights have no version."""
    return Reason.ENGINE_FAILED.error(
        f"{product} at {url} takes no updates: {refuted.why}; its weights were not the checkpoint's, or a step "
        "of its first load is not repeated",
        field="options.url",
        next_step="Start the server again: its weights have no version now. A server that rlctl launches serves its "
        "checkpoint without updates.",
    )


def prompt(limits: Limits) -> list[int]:
    """Return token ids spread over the lower half of the vocabulary. Placeholders of pictures are in the upper half."""
    half = max(limits.vocab_size // 2, 1)
    count = max(min(PROMPT_TOKENS, limits.longest_prompt - OUTPUT_TOKENS), 1)
    return [(index * 7919 + 3) % half for index in range(count)]


async def trial(limits: Limits, compute: Compute, load: Callable[[], Awaitable[None]]) -> Refuted | None:
    """Load a second time and compare. Return None if the second load computes the same values as the first.

    Raises the errors of ``compute`` and ``load`` if the server does not answer or is gone.
    """
    tokens = prompt(limits)
    before = []
    after = []
    loaded = False
    try:
        before += [await compute(tokens, OUTPUT_TOKENS) for _ in range(RUNS)]
        loaded = True
        await load()
        after += [await compute(tokens, OUTPUT_TOKENS) for _ in range(RUNS)]
    except RlctlError as error:
        if error.reason is not Reason.ENGINE_FAILED or error.outcome == OUTCOME_UNKNOWN:
            raise
        subject = "loading the checkpoint a second time failed" if loaded else "nothing could be computed at the start"
        return Refuted(f"{subject}: {error.message}", loaded)
    difference = differing(before, after)
    return Refuted(difference, loaded) if difference else None


def differing(before: Sequence[Computed], after: Sequence[Computed]) -> str:
    """Describe the difference between the runs before and after the load; "" if it is as small as before the load."""
    # The runs after the load are no measure: a load that leaves garbage may compute different values each time.
    noise = max((_distance(a, b) for a in before for b in before), key=_nan_last)
    gap = min((_distance(a, b) for a in before for b in after), key=_nan_last)
    if not gap <= noise + TOLERANCE:  # NaN is no proof
        return (
            f"a second load of the checkpoint computes other values: log probabilities of a prompt differ by {gap:.2g}"
        )
    outputs = [{tuple(run.tokens) for run in runs} for runs in (before, after)]
    if outputs[0].isdisjoint(outputs[1]) and all(len(tokens) == 1 for tokens in outputs):
        return "a second load of the checkpoint computes other values: greedy tokens differ"
    return ""


def _distance(one: Computed, other: Computed) -> float:
    """Return the largest difference of log probabilities in the prompt, and in the output to its first other token."""
    comparable = len(one.logprobs) - len(one.tokens)
    for mine, theirs in zip(one.tokens, other.tokens, strict=False):
        comparable += 1
        if mine != theirs:
            break
    pairs = list(zip(one.logprobs[:comparable], other.logprobs[:comparable], strict=True))
    if not pairs:
        return float("nan")
    return max((abs(mine - theirs) for mine, theirs in pairs), key=_nan_last)


def _nan_last(distance: float) -> tuple[bool, float]:
    return distance != distance, distance
