"""The probe: log probabilities of fixed prompts for a trainer, computed beside the KV cache while no step runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.contract.errors import Reason
from rlctl.v1.verbs_pb2 import ProbePrompt
from rlctl_torch.model.kv_cache import KVCache
from rlctl_torch.rank import Rank
from rlctl_torch.steps.step_plan import Batch
from rlctl_torch.verbs.beside_cache import log_probabilities, within_memory


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
def probed(rank: Rank, prompts: Sequence[ProbePrompt]) -> list[ProbePrompt]:
    """Return the prompts with the log probability of every token but the first, float32; empty at followers.

    All ranks together. Keys and values go to a separate cache, so that frozen requests and a released cache do not
    matter. Raises MEMORY_FULL.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    caches: list[KVCache] = []
    rank.ranks.agree(lambda: caches.append(rank.cache.alike(len(longest.token_ids))))

    def answer(prompt: ProbePrompt) -> ProbePrompt:
        tokens = list(prompt.token_ids)
        places = range(len(tokens))
        batch = Batch([0], [0], [len(tokens)], tokens, [1 + place for place in places], list(places)[:-1])
        scores = log_probabilities(rank, caches[0], batch)
        next_tokens = torch.tensor(tokens[1:], device=scores.device)[:, None]
        return ProbePrompt(token_ids=tokens, logprobs=scores.gather(1, next_tokens)[:, 0].tolist())

    results = within_memory(rank, lambda: answer(longest), lambda: [answer(prompt) for prompt in prompts])
    return results if rank.ranks.rank == 0 else []
