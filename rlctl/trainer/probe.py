"""Prompts with log probabilities, passed with an update so that every engine must reproduce the log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlctl.contract.errors import Reason
from rlctl.v1 import verbs_pb2

TOLERANCE = 0.05


@dataclass(frozen=True)
class Probe:
    """Fixed prompts and the log probabilities that the new weights give their tokens.

    Attributes:
        prompts: token ids, at least two per prompt.
        logprobs: for each prompt the natural logarithm of the probability of every token but the first, given the
            tokens before, at temperature 1.
        tolerance: largest accepted difference, above zero. Engines round differently: choose by the compute dtype.
    """

    prompts: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    tolerance: float = TOLERANCE

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, prompts: Sequence[Sequence[int]], *, tolerance: float = TOLERANCE) -> Probe:
        """Return the probe that these weights pass. Runs a causal language model whose output has ``logits``.

        Raises FIELD_INVALID for prompts that are not token ids.
        """
        device = next(model.parameters()).device
        logprobs = []
        for number, prompt in enumerate(prompts):
            try:
                tokens = torch.tensor([list(prompt)], device=device)
            except (TypeError, ValueError):
                raise Reason.FIELD_INVALID.error(
                    f"a prompt of a probe is token ids, not {prompt!r}",
                    field=f"probe.prompts[{number}]",
                    next_step="Pass the token ids of your tokenizer.",
                ) from None
            rows = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
            logprobs.append(rows.gather(1, tokens[0, 1:, None])[:, 0].tolist())
        return cls([list(prompt) for prompt in prompts], logprobs, tolerance)

    def to_proto(self) -> verbs_pb2.Probe:
        """Return the probe as a message. Raises ValueError if the numbers of logprobs and prompts differ."""
        prompts = [
            verbs_pb2.ProbePrompt(token_ids=tokens, logprobs=values)
            for tokens, values in zip(self.prompts, self.logprobs, strict=True)
        ]
        return verbs_pb2.Probe(prompts=prompts, tolerance=self.tolerance)
