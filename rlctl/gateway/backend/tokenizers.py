"""Tokenizers of the models: chat templates, and the text of single tokens. Loaded from disk on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.requests import GENERATE_S
from rlctl.runtime.shielding import shielded
from rlctl.sdk.aio import AsyncFleet

T = TypeVar("T")

LONG = 10_000
"""Characters or tokens from which on work is done on a thread, to keep the event loop responsive."""

_RESERVED = ("conversation", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length")
"""Template settings that callers cannot make, like all names that begin with "return_".

A template is a program, and the other settings decide how its text is used.
"""


async def beside(size: int, work: Callable[[], T]) -> T:
    """Return the result of the work, done on a thread if ``size`` is at least ``LONG``."""
    return await asyncio.to_thread(work) if size >= LONG else work()


class Tokenizer:
    """Tokenizer of a model."""

    def __init__(self, path: str) -> None:
        """Raises CHECKPOINT_NOT_FOUND, UNSUPPORTED."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise Reason.UNSUPPORTED.error(
                "rendering a chat needs transformers, which the gateway does not have",
                field="messages",
                next_step="Install rlctl[torch] in the gateway's environment, or send input_ids to /generate.",
            ) from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"the tokenizer in {path} cannot be read: {error}",
                next_step="Start the gateway with --tokenizer DIRECTORY.",
            ) from error

    async def chat(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], size: int) -> list[int]:
        """Return the token ids of a conversation of ``size`` bytes. ``settings`` are the caller's for the template.

        Raises UNSUPPORTED without a template, FIELD_INVALID for a refusal of the template and for reserved settings.
        """
        for name in settings:
            if name in _RESERVED or name.startswith("return_"):
                raise Reason.FIELD_INVALID.error("callers cannot set it", field=f"chat_template_kwargs.{name}")
        return await beside(size, lambda: self._chat(messages, settings))

    def _chat(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise Reason.UNSUPPORTED.error(
                "the model's tokenizer has no chat template",
                field="messages",
                next_step="Use /v1/completions or /generate.",
            )
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **settings}
            )
        except Exception as error:
            raise Reason.FIELD_INVALID.error(f"the template refuses the messages: {error}", field="messages") from error
        return list(ids)

    def text(self, token: int) -> str:
        return self.join([token])

    def join(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens. Raises FIELD_INVALID for invalid token ids."""
        try:
            return str(self._tokenizer.decode(tokens))
        except (OverflowError, TypeError) as error:
            raise Reason.FIELD_INVALID.error(f"a value is no token id: {error}", field="tokens") from None

    async def ids(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text; ``special`` adds the special tokens around a text."""
        return await beside(len(text), lambda: list(self._tokenizer.encode(text, add_special_tokens=special)))


class Tokenizers:
    """Tokenizers of a fleet's models, by name."""

    def __init__(self, fleet: AsyncFleet, path: str = "", timeout_s: float = GENERATE_S) -> None:
        """``path``: common directory, instead of the checkpoints. ``timeout_s``: longest wait of a request."""
        self._fleet = fleet
        self._path = path
        self._timeout_s = timeout_s
        self._loaded: dict[str, Tokenizer] = {}
        self._loading: dict[str, asyncio.Task[Tokenizer]] = {}
        """Loads under way, by model. A slow load delays requests for that model only."""

    async def of(self, model: str) -> Tokenizer:
        """Return the tokenizer of a model. Raises CHECKPOINT_NOT_FOUND, UNSUPPORTED, DEADLINE_EXCEEDED."""
        if model in self._loaded:
            return self._loaded[model]
        if model not in self._loading:
            task = self._loading[model] = asyncio.create_task(self._load(model))
            task.add_done_callback(lambda _: self._loading.pop(model))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await shielded(self._loading[model])  # other requests may wait for the same load
        except TimeoutError:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"the tokenizer of {model} was not read within {self._timeout_s:g} s",
                next_step="Check the file system of its directory.",
            ) from None

    async def _load(self, model: str) -> Tokenizer:
        path = await self.directory(model)
        if not path:
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"where the tokenizer of {model} lies is not known: its latest version is not on disk",
                next_step="Start the gateway with --tokenizer DIRECTORY.",
            )
        tokenizer = self._loaded[model] = await asyncio.to_thread(Tokenizer, path)
        return tokenizer

    async def warm(self) -> None:
        """Load the tokenizers of the present models, so that no request waits for a load or an import."""
        for model in await self._fleet.models():
            if await self.directory(model.name):
                await self.maybe(model.name)

    async def directory(self, model: str) -> str:
        """Return the directory of a model's tokenizer, or "" if unknown."""
        checkpoints = {entry.name: entry.checkpoint for entry in await self._fleet.models()}
        return self._path or checkpoints.get(model, "")

    async def maybe(self, model: str) -> Tokenizer | None:
        """Return the tokenizer of a model, or None if there is no tokenizer."""
        try:
            return await self.of(model)
        except RlctlError:
            return None
