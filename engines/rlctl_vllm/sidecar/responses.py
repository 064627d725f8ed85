"""vLLM's answers about a sample, from either route, in SGLang's format. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlctl_servers.requests.limits import logprob_start

from rlctl.contract.errors import Reason
from rlctl.sglang_api.request import PromptRequest
from rlctl.sglang_api.response import Entry, Reply, aborted
from rlctl_vllm.requests.bodies import scores_only
from rlctl_vllm.requests.requests import id_in, id_of, most_likely, refused

TOKENS = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


def completion(body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the body for /v1/completions that equals a body for /inference/v1/generate."""
    sampling = {name: value for name, value in body["sampling_params"].items() if name != "detokenize"}
    fields = {
        name: value for name, value in body.items() if name not in ("token_ids", "sampling_params", "output_mode")
    }
    return {
        **fields,
        **sampling,
        "model": model,
        "prompt": body["token_ids"],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def wire_version(label: str, *, driven: bool) -> int | str:
    """Return a weight version as SGLang's callers expect: a number if its label is a number.

    ``driven``: rlctl sets the labels of this vLLM, LABEL@SEQUENCE.
    """
    name, at, sequence = label.rpartition("@")
    if driven and at and sequence.isdigit():
        label = name
    return int(label) if label.isascii() and label.isdigit() else label


class Sample(Reply):
    """A sample as it grows.

    Attributes:
        heard: vLLM has answered with a part of the sample.
        label: vLLM's label of the weights of the last token; "" while unknown.
    """

    def __init__(self, prompt_request: PromptRequest, rid: str, prompt: Sequence[int], *, driven: bool) -> None:
        request = prompt_request.request
        super().__init__(
            rid,
            logprob=request.return_logprob,
            tops=bool(request.top_logprobs_num),
            show_prompt=prompt_request.show_prompt,
        )
        self.heard = False
        self.label = ""
        self._prompt_request = prompt_request
        self._prompt = prompt
        self._driven = driven
        self._scores_only = scores_only(request)
        self._tops = request.top_logprobs_num
        self._text: list[str] = []
        self._cached = 0

    def take(self, answer: Mapping[str, Any]) -> None:
        """Add an answer of vLLM. Raises vLLM's refusal of the request, and ENGINE_FAILED."""
        if "choices" not in answer:
            error = answer.get("error") or {}
            raise refused(str(error.get("message")), int(error.get("code") or 500))
        self.heard = True
        for choice in answer["choices"]:
            prompt = answer.get("prompt_logprobs") or choice.get("prompt_logprobs")
            if prompt and not self._input:
                self._take_prompt(prompt)
            self._take_choice(choice)
        usage = answer.get("usage")
        if usage:
            self._cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def cut_off(self) -> None:
        """Mark the sample as aborted. The sample was ended, and vLLM has not reported its end."""
        self.finish = aborted()

    def answer(self) -> dict[str, Any]:
        """Return the answer with all output so far."""
        return self.body(
            "".join(self._text),
            self._prompt,
            prompt_tokens=len(self._prompt),
            cached=self._cached,
            version=wire_version(self.label, driven=self._driven) if self.label else None,
        )

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        ids = choice.get("token_ids") or ()
        if not self._scores_only:
            self._ids.extend(ids)
            self._text.append(choice.get("text") or "")
            if self._with_logprobs and choice.get("logprobs"):
                self._take_logprobs(ids, choice["logprobs"])
        for span in choice.get("weight_versions") or ():
            self.label = str(span["version"])
            version = wire_version(self.label, driven=self._driven)
            end = min(span["end"], len(self._ids))
            if span["start"] < end:
                self._spans.append({"version": version, "start": span["start"], "end": end})
        if choice.get("finish_reason") is not None:
            self.finish = self._finish(str(choice["finish_reason"]), choice.get("stop_reason"))

    def _take_logprobs(self, ids: Sequence[int], logprobs: Mapping[str, Any]) -> None:
        values: Iterable[float | None]
        tops: Iterable[Iterable[tuple[int, float]]]
        if "content" in logprobs:
            content = logprobs["content"]
            values = [entry["logprob"] for entry in content]
            tops = ([(id_of(top), top["logprob"]) for top in entry.get("top_logprobs") or ()] for entry in content)
        else:
            values = logprobs["token_logprobs"]
            tops = (
                [(id_in(token), value) for token, value in (entry or {}).items()]
                for entry in logprobs.get("top_logprobs") or ()
            )
        self._logprobs.extend([value, token, None] for value, token in zip(values, ids, strict=True))
        if self._tops:
            self._top.extend(_entries(each, self._tops) for each in tops)

    def _take_prompt(self, prompt_logprobs: Sequence[Mapping[str, Any] | None]) -> None:
        start = logprob_start(self._prompt_request.request)
        if start < 0:
            return
        for token, entry in list(zip(self._prompt, prompt_logprobs, strict=False))[start:]:
            self._input.append([entry[str(token)]["logprob"] if entry else None, token, None])
            tops = ((int(top), value["logprob"]) for top, value in (entry or {}).items())
            self._input_top.append(_entries(tops, self._tops) if entry else None)

    def _finish(self, kind: str, stop: int | str | None) -> dict[str, Any]:
        if kind == "abort":
            return aborted()
        if kind == "length" or (kind == "stop" and self._scores_only):
            return {"type": "length", "length": len(self._ids)}
        if kind != "stop":
            raise Reason.ENGINE_FAILED.error(f"vLLM ended the sample for a reason that is not known: {kind}")
        # vLLM does not name an end-of-sequence token, which is the last token.
        return {"type": "stop", "matched": stop if stop is not None else self._ids[-1] if self._ids else None}


def _entries(tops: Iterable[tuple[int, float]], count: int) -> list[Entry]:
    return [[value, token, None] for token, value in most_likely(tops, count)]
