"""Samples in the form of SGLang's /generate. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = list[Any]
"""[log probability or None, token id, None], as SGLang. The third item is the token's text, on request."""


class Reply:
    """A growing sample in SGLang's form.

    Attributes:
        rid: the caller's request id.
        finish: SGLang's finish reason once the sample has ended.
    """

    def __init__(self, rid: str, *, logprob: bool, tops: bool, show_prompt: bool) -> None:
        self.rid = rid
        self.finish: dict[str, Any] | None = None
        self._with_logprobs = logprob
        self._with_tops = tops
        self._show_prompt = show_prompt
        self._ids: list[int] = []
        self._logprobs: list[Entry] = []
        self._top: list[list[Entry]] = []
        self._input: list[Entry] = []
        self._input_top: list[list[Entry] | None] = []
        self._spans: list[dict[str, Any]] = []

    def body(
        self, text: str, prompt: Sequence[int], *, prompt_tokens: int, cached: int, version: int | str | None
    ) -> dict[str, Any]:
        """Return the reply with all output so far."""
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(self._ids),
            "cached_tokens": cached,
            "weight_version": version,
        }
        if self._spans:
            meta["weight_versions"] = self._spans
        if self._with_logprobs:
            meta["output_token_logprobs"] = self._logprobs
            meta["input_token_logprobs"] = self._input
            if self._with_tops:
                meta["output_top_logprobs"] = self._top
                meta["input_top_logprobs"] = self._input_top
        answer = {"text": text, "output_ids": self._ids, "meta_info": meta}
        if self._show_prompt:
            answer["prompt_token_ids"] = list(prompt)
        return answer


def aborted(message: str = "") -> dict[str, Any]:
    return {"type": "abort", "message": message or "Aborted", "status_code": None, "err_type": None}
