"""The radix middleware of slime's router: what was generated, kept by text and by token ids, and gone on from.

A prompt of POST /generate, to the gateway or to the router in front of it, that begins as something that was generated
gets those very tokens, and what follows them is tokenised by itself; the reply is kept in its turn. POST
/retrieve_from_text gives the tokens, log probabilities and loss mask of a text. A request that a pause or an abort cuts
goes on from its tokens (:mod:`rlctl.rollout.continuation`), so and so often. Streams, batches and several samples of a
prompt pass by.

It belongs to one gateway process: several that share a port would each know a part.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.gateway.backend.service import Generation
from rlctl.gateway.backend.tokenizers import Tokenizer
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Handler, Reply
from rlctl.gateway.http.placeholders import PREFERRED
from rlctl.gateway.radix.trajectories import MAX_AGE, MAX_TOKENS, Piece, Trajectories, Version
from rlctl.v1.rollout_pb2 import TokenIds

CUTS = 5
"""Cuts that a request goes on from; the next one is the caller's."""

_PROMPTS = ("text", "input_ids", "input_tokens")


class RadixMiddleware:
    """Keeps ``max_tokens`` tokens of each model and each of its adapters that there are, of ``max_age`` versions; a
    subclass may say otherwise.
    """

    max_tokens = MAX_TOKENS
    max_age = MAX_AGE

    def __init__(self, generation: Generation) -> None:
        self._generation = generation.with_settings(
            dataclasses.replace(generation.settings, resume="continue", max_cuts=CUTS)
        )
        self._kept: dict[tuple[str, str], Trajectories] = {}

    async def __call__(self, call: Call, handler: Handler) -> Answer:
        """Around every request."""
        call.generation = self._generation
        path = call.url.partition("?")[0]
        if path == "/retrieve_from_text":
            return await self._retrieve(call)
        if path == "/generate" or (PREFERRED in call.path and path.endswith("/generate")):  # the router's
            return await self._generate(call, handler)
        return await handler(call)

    async def _generate(self, call: Call, handler: Handler) -> Answer:
        body = await call.json()
        prompt = await call.beside(lambda: _prompt(body))
        if prompt is None:
            return await handler(call)
        kept, tokenizer = await self._of(str(body.get("model") or ""), str(body.get("lora_path") or ""))
        pieces = await _known(kept, tokenizer, prompt)
        rest = {name: value for name, value in body.items() if name not in _PROMPTS}
        ids = [token for piece in pieces for token in piece.tokens]
        call.replace_json({**rest, "input_ids": ids, "return_logprob": True})
        answer = await handler(call)
        if isinstance(answer, Reply) and isinstance(answer.body, dict) and "output_ids" in answer.body:
            # The answer does not wait for it, and whatever is asked next finds it.
            told = answer.body
            asyncio.get_running_loop().call_soon(lambda: kept.put([*pieces, *_response(told, tokenizer)]))
        return answer

    async def _retrieve(self, call: Call) -> Reply:
        fields = await call.fields()
        fields.accept("return_logp", "return_logprob")
        text = fields.take("text", str)
        kept, tokenizer = await self._of(fields.take("model", str, ""), fields.take("lora_path", str, ""))
        pieces = await _known(kept, tokenizer, text)
        tokens = [token for piece in pieces for token in piece.tokens]
        mask = [int(trained) for piece in pieces for trained in piece.loss_mask or [0] * len(piece.tokens)]
        versions = [version for piece in pieces for version in piece.versions or [None] * len(piece.tokens)]
        return Reply(
            {
                "tokens": tokens,
                "response": text,
                "loss_mask": mask,
                "token_length": len(tokens),
                "loss_mask_length": len(mask),
                "rollout_logp": [value for piece in pieces for value in piece.logprobs or [0.0] * len(piece.tokens)],
                "weight_versions": versions,
            }
        )

    async def _of(self, named: str, adapter: str) -> tuple[Trajectories, Tokenizer]:
        """What is kept of a model with an adapter ("": none), as old as the model is now."""
        model = await self._generation.model(named)
        tokenizer = await self._generation.tokenizers.of(model)
        kept = self._kept.get((model, adapter))
        if kept is None:
            kept = await self._begun(model, adapter)
        kept.advance(self._generation.rollout(model).latest)
        return kept, tokenizer

    async def _begun(self, model: str, adapter: str) -> Trajectories:
        """Place for one that nothing is kept of, instead of those that the model has no longer; for this call only if
        it has none of this name.
        """
        made = Trajectories(self.max_tokens, self.max_age)
        models = await self._generation.fleet.models()
        there = {"", *(each.name for found in models if found.name == model for each in found.adapters)}
        if adapter not in there:
            return made
        for key in [key for key in self._kept if key[0] == model and key[1] not in there]:
            del self._kept[key]
        return self._kept.setdefault((model, adapter), made)


def _prompt(body: Any) -> str | list[int] | None:
    """The only prompt of a body for one whole sample; None: it is something else, or wrong."""
    if not isinstance(body, Mapping) or body.get("stream"):
        return None
    sampling = body.get("sampling_params")
    if isinstance(sampling, Mapping) and sampling.get("n") not in (None, 1):
        return None
    given = [body[name] for name in _PROMPTS if body.get(name) is not None]
    if not given or any(other != given[0] for other in given):
        return None
    prompt = list(given[0].ids) if isinstance(given[0], TokenIds) else given[0]
    if isinstance(prompt, str):
        return prompt or None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    return None


async def _known(kept: Trajectories, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[Piece]:
    """The prompt in pieces: what is kept of it, and the rest."""
    if not isinstance(prompt, str):
        found = kept.by_ids(prompt)
        pieces = list(found.pieces) if found else []
        rest = prompt[len(found.tokens) if found else 0 :]
        return [*pieces, Piece(tokenizer.join(rest), rest)] if rest else pieces
    found = kept.by_text(prompt)
    pieces = list(found.pieces) if found else []
    text = prompt[len(found.text) if found else 0 :]
    if not text:
        return pieces
    ids = await tokenizer.ids(text, special=found is None)
    return [*pieces, Piece(text, ids)] if ids else pieces


def _response(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[Piece]:
    """What a reply says of its tokens: those of its text, and those of a stop that was left out of it."""
    ids, meta = body["output_ids"], body["meta_info"]
    versions: list[Version | None] = [meta.get("weight_version")] * len(ids)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    pieces = []
    for text, begin, end in _parts(body["text"], ids, meta["finish_reason"], tokenizer):
        part = slice(begin, end)
        pieces.append(Piece(text, ids[part], logprobs[part], versions[part], [1] * (end - begin)))
    return pieces


def _parts(
    text: str, ids: Sequence[int], finish: Mapping[str, Any], tokenizer: Tokenizer
) -> list[tuple[str | None, int, int]]:
    """The text and what was left out of it at its end, each with its stretch of the tokens."""
    whole = tokenizer.join(ids) if finish["type"] == "stop" else text
    # A tokenizer that is given a text's beginning may leave out the space before it, which an engine tells.
    whole, stripped = whole.lstrip(" "), text.lstrip(" ")
    if whole == stripped:
        return [(text, 0, len(ids))]
    if not whole.startswith(stripped):
        return [(None, 0, len(ids))]
    left_out = whole[len(stripped) :]
    for end in range(len(ids) - 1, 0, -1):
        begun = tokenizer.join(ids[:end]).lstrip(" ")
        if begun == stripped:
            return [(text, 0, end), (left_out, end, len(ids))]
        if len(begun) < len(stripped):
            break  # a token has something of both
    return [(text + left_out, 0, len(ids))]
