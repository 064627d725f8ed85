"""The probe: log probabilities of fixed prompts for a trainer, computed beside the KV cache while no step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import ProbePrompt
from rlctl_torch.generation.forward_pass import run
from rlctl_torch.rank import Rank
from rlctl_torch.steps.step_plan import Batch


def refuse_prompts(rank: Rank, prompts: Sequence[ProbePrompt]) -> None:
    """Raise ILLEGAL_STATE unless steps are at rest; PROMPT_TOO_LONG or FIELD_INVALID for a prompt that cannot be
    computed.
    """
    if not rank.at_rest:
        raise Reason.ILLEGAL_STATE.error("a probe is computed while generation is paused", next_step="Pause first.")
    for index, prompt in enumerate(prompts):
        if len(prompt.token_ids) > rank.longest:
            raise Reason.PROMPT_TOO_LONG.error(
                f"prompt {index} has {len(prompt.token_ids)} tokens, {rank.longest} fit",
                field=f"prompts[{index}].token_ids",
            )
        if max(prompt.token_ids) >= rank.model.vocab_size:
            raise Reason.FIELD_INVALID.error(
                f"prompt {index} has token {max(prompt.token_ids)}, the vocabulary ends at {rank.model.vocab_size}",
                field=f"prompts[{index}].token_ids",
            )


@torch.inference_mode()
def log_probabilities(rank: Rank, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
    """Return the prompts with the log probability of every token but the first, float32; empty at followers.

    All ranks together. Keys and values go to a separate cache, so that frozen requests and a released cache do not
    matter.
    """
    cache = rank.cache.alike(max(len(prompt.token_ids) for prompt in prompts))
    results = []
    for prompt in prompts:
        tokens = list(prompt.token_ids)
        places = range(len(tokens))
        batch = Batch([0], [0], [len(tokens)], tokens, [1 + place for place in places], list(places)[:-1])
        logits = run(rank.model, cache, rank.adapters, batch, all_logits=True)
        next_tokens = torch.tensor(tokens[1:], device=logits.device)[:, None]
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, next_tokens)[:, 0]
        results.append(ProbePrompt(token_ids=tokens, logprobs=chosen.tolist()))
    return results if rank.ranks.rank == 0 else []
