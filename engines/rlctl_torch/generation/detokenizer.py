"""The tokenizer, and text from tokens as they arrive: never half a character, never part of a stop string."""

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
"""Most tokens of an incomplete character so far: a character has at most four bytes, and each token at least one."""

_PATIENCE = 8
"""Most tokens that may wait for the end of a character. More tokens form no character, except perhaps the last few."""


class Tokenizer:
    """Conversion between text and token ids."""

    def __init__(self, path: str) -> None:
        """Load the tokenizer of a checkpoint directory. Raises CHECKPOINT_NOT_FOUND if its files cannot be read."""
        self.path = path
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # a broken file may make the tokenizer libraries raise anything
            raise Reason.CHECKPOINT_NOT_FOUND.error(
                f"the tokenizer in {path} cannot be read: {error}", field="model_path"
            ) from error
        # The Rust tokenizer, if available: transformers' own decode costs ten times as much per token. Its encode
        # changes the settings of the Rust tokenizer, which must not happen while a different thread decodes.
        self._fast: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id  # type: ignore[no-any-return]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the model expects."""
        if self._fast is not None:
            return list(self._fast.encode(text).ids)
        return list(self._tokenizer(text)["input_ids"])

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> str:
        if self._fast is not None:  # the Rust tokenizer never puts spaces there
            return str(self._fast.decode(ids, skip_special_tokens=skip_special_tokens))
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return text


def find_tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint directory, or None if the directory has no tokenizer."""
    if not any((Path(path) / name).exists() for name in _FILES):
        return None
    return Tokenizer(path)


_BEFORE = range(5, 9)
"""Numbers of prompt tokens to decode together with the first output tokens. The smallest number whose text is whole
characters is taken.
"""


class TextStream:
    """Text of a sample in pieces, as the continuation of the tokens ``before``.

    Tokens are decoded together with earlier tokens that affect their text (a leading space, the first bytes of a
    character). A possible start of a stop string is held back until the stop string is ruled out.
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
        """Take the next token. Return the text to send now, and the stop string that the token completed, if any.

        Without ``may_stop``, stop strings pass. After a stop nothing may be added.
        """
        self._ids.append(token)
        self._decode(final=False)
        if not self._stops or not may_stop:
            piece, self._held = self._held, ""
            return piece, None
        matches = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            at, stop = min(matches, key=lambda entry: (entry[0], -len(entry[1])))
            piece = self._held[: at + len(stop) if self._keep_stop else at]
            self._held = ""
            return piece, stop
        keep = self._possible_start()
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece, None

    def finish(self) -> str:
        """Return the remaining text when the output ends without a stop string."""
        self._decode(final=True)
        piece, self._held = self._held, ""
        return piece

    def _end_of(self, before: Sequence[int]) -> tuple[list[int], str]:
        """Return the last tokens of ``before`` with their text, or nothing if that text is not whole characters."""
        for count in _BEFORE if before else ():
            ids = list(before[-count:])
            text = self._decoded(ids)
            if text and _INCOMPLETE not in text:
                return ids, text
        return [], ""

    def _decode(self, *, final: bool) -> None:
        """Move decodable text into ``_held``. ``_context`` is the text of ``_ids[:_read]``."""
        if self._read == len(self._ids):
            return
        text = self._decoded(self._ids)
        if text.endswith(_INCOMPLETE) and not final:
            if len(self._ids) - self._read <= _PATIENCE:
                return
            # Bytes that form no character, or the replacement character itself, over and over.
            tail = self._decoded(self._ids[-_LONGEST:])
            head = self._decoded(self._ids[:-_LONGEST])
            if head + tail == text:
                self._held += head[len(self._context) :]
                self._ids, self._read, self._context = self._ids[-_LONGEST:], 0, ""
            return
        self._held += text[len(self._context) :]
        # The tokens just decoded are context enough for the next tokens, unless their text is empty.
        context = self._decoded(self._ids[self._read :])
        if context:
            self._ids, text = self._ids[self._read :], context
        self._read, self._context = len(self._ids), text

    def _possible_start(self) -> int:
        """Return the length of the longest end of the held text that starts a stop string."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
