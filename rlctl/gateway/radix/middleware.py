"""The radix middleware of slime's router: keeps generated tokens by text and by token ids, and reuses them.

The middleware handles POST /generate, at the gateway and at the router in front of it. A prompt that begins with a kept
trajectory gets the kept tokens. Only the rest of the prompt is tokenised, and the reply is kept in turn. POST
/retrieve_from_text returns tokens, log probabilities and loss mask of a text. A request cut by a pause or an abort
continues from its tokens (:mod:`rlctl.rollout.continuation`), at most ``CUTS`` times. Streams, batches and several
samples of a prompt pass through unchanged.

The kept trajectories belong to one gateway process: processes that share a port would each know a part.
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
"""Number of cuts after which a request still continues. The next cut is returned to the caller."""

_PROMPTS = ("text", "input_ids", "input_tokens")


class RadixMiddleware:
    """Keeps up to ``max_tokens`` tokens of at most ``max_age`` versions, for each model and each loaded adapter.

    A subclass may set different limits.
    """

    max_tokens = MAX_TOKENS
    max_age = MAX_AGE

    def __init__(self, generation: Generation) -> None:
        self._generation = generation.with_settings(
            dataclasses.replace(generation.settings, resume="continue", max_cuts=CUTS)
        )
        self._kept: dict[tuple[str, str], Trajectories] = {}

    async def __call__(self, call: Call, handler: Handler) -> Answer:
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
        trajectories, tokenizer = await self._of(str(body.get("model") or ""), str(body.get("lora_path") or ""))
        pieces = await _known(trajectories, tokenizer, prompt)
        rest = {name: value for name, value in body.items() if name not in _PROMPTS}
        ids = [token for piece in pieces for token in piece.tokens]
        call.replace_json({**rest, "input_ids": ids, "return_logprob": True})
        answer = await handler(call)
        if isinstance(answer, Reply) and isinstance(answer.body, dict) and "output_ids" in answer.body:
            # The response does not wait for the insertion, and later requests find the tokens.
            reply_body = answer.body
            asyncio.get_running_loop().call_soon(lambda: trajectories.put([*pieces, *_response(reply_body, tokenizer)]))
        return answer

    async def _retrieve(self, call: Call) -> Reply:
        fields = await call.fields()
        fields.accept("return_logp", "return_logprob")
        text = fields.take("text", str)
        trajectories, tokenizer = await self._of(fields.take("model", str, ""), fields.take("lora_path", str, ""))
        pieces = await _known(trajectories, tokenizer, text)
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
        """Return the trajectories of a model with an adapter ("" for no adapter), advanced to the model's present
        version.
        """
        model = await self._generation.model(named)
        tokenizer = await self._generation.tokenizers.of(model)
        trajectories = self._kept.get((model, adapter))
        if trajectories is None:
            trajectories = await self._begun(model, adapter)
        trajectories.advance(self._generation.rollout(model).latest)
        return trajectories, tokenizer

    async def _begun(self, model: str, adapter: str) -> Trajectories:
        """Make an adapter's trajectories, kept only if the adapter is loaded. Drop unloaded adapters' trajectories."""
        trajectories = Trajectories(self.max_tokens, self.max_age)
        models = await self._generation.fleet.models()
        loaded = {"", *(each.name for entry in models if entry.name == model for each in entry.adapters)}
        if adapter not in loaded:
            return trajectories
        for key in [key for key in self._kept if key[0] == model and key[1] not in loaded]:
            del self._kept[key]
        return self._kept.setdefault((model, adapter), trajectories)


def _prompt(body: Any) -> str | list[int] | None:
    """Return the only prompt of a body for one complete sample; None for other or invalid bodies."""
    if not isinstance(body, Mapping) or body.get("stream"):
        return None
    sampling = body.get("sampling_params")
    if isinstance(sampling, Mapping) and sampling.get("n") not in (None, 1):
        return None
    prompts = [body[name] for name in _PROMPTS if body.get(name) is not None]
    if not prompts or any(each != prompts[0] for each in prompts):
        return None
    prompt = list(prompts[0].ids) if isinstance(prompts[0], TokenIds) else prompts[0]
    if isinstance(prompt, str):
        return prompt or None
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    return None


async def _known(kept: Trajectories, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[Piece]:
    """Return the prompt in pieces: the kept pieces, and the rest."""
    if not isinstance(prompt, str):
        record = kept.by_ids(prompt)
        pieces = list(record.pieces) if record else []
        rest = prompt[len(record.tokens) if record else 0 :]
        return [*pieces, Piece(tokenizer.join(rest), rest)] if rest else pieces
    record = kept.by_text(prompt)
    pieces = list(record.pieces) if record else []
    text = prompt[len(record.text) if record else 0 :]
    if not text:
        return pieces
    ids = await tokenizer.ids(text, special=record is None)
    return [*pieces, Piece(text, ids)] if ids else pieces


def _response(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[Piece]:
    """Return the pieces of a reply: the tokens of its text, and of a stop that was removed from the text.

    A token outside the spans has no known version: its stage has ended before it reported the version.
    """
    ids, meta = body["output_ids"], body["meta_info"]
    versions: list[Version | None] = [None] * len(ids)
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
    """Return the text and the removed stop, each with its range of tokens."""
    whole = tokenizer.join(ids) if finish["type"] == "stop" else text
    # A tokenizer may drop the leading space of a text, but an engine returns the space.
    whole, stripped = whole.lstrip(" "), text.lstrip(" ")
    if whole == stripped:
        return [(text, 0, len(ids))]
    if not whole.startswith(stripped):
        return [(None, 0, len(ids))]
    stop = whole[len(stripped) :]
    for end in range(len(ids) - 1, 0, -1):
        prefix = tokenizer.join(ids[:end]).lstrip(" ")
        if prefix == stripped:
            return [(text, 0, end), (stop, end, len(ids))]
        if len(prefix) < len(stripped):
            break  # a token has parts of both
    return [(text + stop, 0, len(ids))]
