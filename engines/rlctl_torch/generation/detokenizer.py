"""The tokenizer, and turning tokens into text as they come: never half a character, never part of a stop string."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rlctl.contract.errors import Reason

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_INCOMPLETE = "\ufffd"
_LONGEST = 3
"""Tokens that an incomplete character may have so far: each has a byte of its at least, and it has four at most."""

_PATIENCE = 8
"""Tokens that are waited for; what ends in no character then was never going to be one, up to the last few."""


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, path: str) -> None:
        """Load the tokenizer of a checkpoint directory. Raises CHECKPOINT_NOT_FOUND when its files cannot be read."""
        self.path = path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the tokenizer libraries raise
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"the tokenizer in {path} cannot be read: {error}", field="model_path"
            ) from error
        # The Rust tokenizer, where there is one: transformers' own decode costs ten times as much per token, and its
        # encode changes the Rust tokenizer's settings, which must not happen while another thread decodes.
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a text, if it has one."""
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model expects around it."""
        if self._fast is not None:
            return list(self._fast.encode(text).ids)
        return list(self._tokenizer(text)["input_ids"])

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of these ids."""
        if self._fast is not None:  # it never puts spaces there
            return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return text


def find_tokenizer(path: str) -> Tokenizer | None:
    """The tokenizer of a checkpoint directory, or None when it holds none."""
    if not any((Path(path) / name).exists() for name in _FILES):
        return None
    return Tokenizer(path)


_BEFORE = range(5, 9)
"""Tokens of the prompt that the output's first ones are decoded together with: as few as begin with a character."""


class TextStream:
    """Text of one sample, in pieces that can be given away: what comes after the text of the tokens ``before`` it.

    Tokens are decoded together with those before them that they may depend on (a leading space, the first bytes of a
    character). What may be the beginning of a stop string is held back until it is not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool,
        keep_stop: bool,
        spaces_between_special_tokens: bool = True,
        before: Sequence[int] = (),
    ) -> None:
        self._decoded = functools.partial(
            tokenizer.decode,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._stops = stops
        self._keep_stop = keep_stop
        self._ids, self._context = self._end_of(before)
        self._read = len(self._ids)
        self._held = ""

    def add(self, token: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Take the next token; returns the text to give away now, and the stop string that it completed, if any.

        Without ``may_stop``, stop strings are let through. After a stop nothing may be added.
        """
        self._ids.append(token)
        self._decode(final=False)
        if not self._stops or not may_stop:
            piece, self._held = self._held, ""
            return piece, None
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda entry: (entry[0], -len(entry[1])))
            piece = self._held[: at + len(stop) if self._keep_stop else at]
            self._held = ""
            return piece, stop
        keep = self._possible_start()
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece, None

    def finish(self) -> str:
        """The rest, when the output ends without a stop string."""
        self._decode(final=True)
        piece, self._held = self._held, ""
        return piece

    def _end_of(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last of these tokens, and their text; none of those that end or go wrong within a character."""
        for count in _BEFORE if before else ():
            ids = list(before[-count:])
            text = self._decoded(ids)
            if text and _INCOMPLETE not in text:
                return ids, text
        return [], ""

    def _decode(self, *, final: bool) -> None:
        """Move what can be decoded into ``_held``. ``_context`` is the text of ``_ids[:_read]``."""
        if self._read == len(self._ids):
            return
        text = self._decoded(self._ids)
        if text.endswith(_INCOMPLETE) and not final:
            if len(self._ids) - self._read <= _PATIENCE:
                return
            # Bytes that make up no characters, or the very sign that stands for them, over and over.
            rest = self._decoded(self._ids[-_LONGEST:])
            begun = self._decoded(self._ids[:-_LONGEST])
            if begun + rest == text:
                self._held += begun[len(self._context) :]
                self._ids, self._read, self._context = self._ids[-_LONGEST:], 0, ""
            return
        self._held += text[len(self._context) :]
        # The tokens just decoded are context enough for the next ones, unless they have no text of their own.
        context = self._decoded(self._ids[self._read :])
        if context:
            self._ids, text = self._ids[self._read :], context
        self._read, self._context = len(self._ids), text

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
