"""POST /generate: SGLang's native format."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from google.protobuf.struct_pb2 import ListValue, Struct

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import check_levels, seed_of
from rlctl.gateway.generation import samples as running
from rlctl.gateway.generation import sessions
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Reply, Stream
from rlctl.rollout import continuation
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime.http_forwarding import min_version
from rlctl.sglang_api import response
from rlctl.sglang_api.request import Asking, PromptRequest, Words, read
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import FINISH_TYPE_LENGTH, FINISH_TYPE_STOP, FinishReason, Sample, TokenLogprob

_ENGINE = frozenset({"priority", "cache_salt", "extra_key", "token_ids_logprob", "return_entropy"})
_OWN = frozenset({"model", "lora_path", "session_id", "routing_key"})

WORDS = Words(
    "this fleet",
    fields=_ENGINE | _OWN,
    sampling=frozenset({"custom_params", "ebnf", "json_schema", "logit_bias", "regex", "stop_regex", "structural_tag"}),
    without={
        **dict.fromkeys(
            (
                *("input_embeds", "image_data", "video_data", "audio_data", "modalities", "session_params"),
                *("custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
                *("bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank", "encoder_urls"),
                *("image_max_dynamic_patch", "images_config", "kv_hints", "lora_id", "max_dynamic_patch"),
                *("max_thinking_tokens", "min_dynamic_patch", "mm_content_hashes", "mm_hashes", "mm_processor_kwargs"),
                *("multi_item_delimiter_indices", "need_wait_for_mm_inputs", "num_items_assigned"),
                *("positional_embed_overrides", "sampling_logprobs_mode", "token_ids_logprob_positions"),
                *("token_indices_to_pool", "video_config", "video_max_dynamic_patch", "watermark"),
            ),
            (None,),
        ),
        **dict.fromkeys(
            (
                *("return_text_in_logprobs", "return_hidden_states", "return_routed_experts", "return_sampling_mask"),
                *("background", "require_reasoning", "return_bytes", "return_flat_raw_output_top_logprobs"),
                *("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_indexer_topk"),
                "use_audio_in_video",
            ),
            (None, False),
        ),
        **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "routed_experts_start_len"), (None, 0)),
        **dict.fromkeys(("no_logs", "log_metrics"), (None, False, True)),
    },
    sampling_without={"beam_width": (None, 1), "stream_interval": (None,), "watermark": (None,)},
)
"""Fields of SGLang that are passed on. The engine refuses unsupported fields, naming ``engine_fields``."""

DONE = b"data: [DONE]\n\n"


async def generate(call: Call) -> Answer:
    """Generate; SGLang's fields and reply."""
    samples, tellers, asking = await _samples(call)
    call.forget()
    if asking.stream:
        return Stream(_events(call, samples, tellers, listed=asking.listed), failed)
    ended = await running.whole(call, samples)
    replies = [teller.all_of(sample) for teller, sample in zip(tellers, ended, strict=True)]
    return Reply(replies if asking.listed else replies[0])


async def _samples(call: Call) -> tuple[list[RolloutSample], list[Teller], Asking]:
    """Return the requested samples and their tellers. The call's own prompts are dropped."""
    began = time.perf_counter()
    body = await call.json()
    limits = call.generation
    asking = await call.beside(
        lambda: read(body, WORDS, check_prompts=limits.check_count, check_bytes=limits.check_bytes)
    )
    call.note_unknown(asking.unknown)
    model = await call.generation.model(_text(body, "model"))
    prompts = str(asking.prompts[0].request.WhichOneof("prompt"))
    call.generation.check_samples([prompt.samples for prompt in asking.prompts], "sampling_params.n", prompts)

    def make() -> tuple[list[RolloutSample], list[Teller]]:
        samples: list[RolloutSample] = []
        tellers: list[Teller] = []
        for number, prompt in enumerate(asking.prompts):
            _complete(prompt, call, model, body)
            for index in range(prompt.samples):
                sample = continuation.begin(
                    prompt.request, prompt=number, index=index, session_id=sessions.named(call, body, prompt.fields)
                )
                if prompt.samples > 1:
                    sample.request.rid = f"{prompt.rid}_{index}"
                if (seed := seed_of(prompt.request.sampling_params, index)) is not None:  # as engines count samples
                    sample.request.sampling_params.seed = seed
                samples.append(sample)
                tellers.append(Teller(sample.request.rid, prompt, began))
        return samples, tellers

    samples, tellers = await call.beside(make)
    return samples, tellers, replace(asking, prompts=())


def failed(error: RlctlError) -> bytes:
    """Return the end of a broken stream."""
    return event({"error": error.described()}) + DONE


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _events(
    call: Call, samples: Sequence[RolloutSample], tellers: Sequence[Teller], *, listed: bool
) -> AsyncIterator[bytes]:
    """Yield events with all output of a sample so far, as SGLang does."""
    news = running.streamed(call, samples)
    try:
        async for new in news:
            teller = tellers[new.index]
            teller.take(new.part, new.prompt_ids)
            reply = teller.reply() if new.ended is None else teller.end(new.ended)
            yield event({**reply, "index": new.index} if listed else reply)
        yield DONE
    finally:
        await news.aclose()


class Teller(response.Reply):
    """Converts a growing sample from the contract to SGLang's form."""

    def __init__(self, rid: str, prompt_request: PromptRequest, began: float) -> None:
        """``began``: time of the call on the performance counter."""
        request = prompt_request.request
        super().__init__(
            rid,
            logprob=request.return_logprob,
            tops=bool(request.top_logprobs_num),
            show_prompt=prompt_request.show_prompt,
        )
        self._prompt: Sequence[int] = ()
        self._text = ""
        self._began = began
        self._whole = Sample()
        self._answered_at: WeightVersion | None = None

    def take(self, part: Sample, prompt_ids: Sequence[int]) -> None:
        """Add new output, and the token ids of the prompt."""
        self._prompt = prompt_ids
        self._text += part.text
        self._ids.extend(part.output_ids)
        for entry in part.output_logprobs:
            self._logprobs.append(_entry(entry))
            if self._with_tops:
                self._top.append([_entry(top) for top in entry.top])
        self._whole.cached_tokens, self._whole.retractions = part.cached_tokens, part.retractions
        for span in part.versions:
            self._whole.versions.add().CopyFrom(span)

    def reply(self) -> dict[str, Any]:
        """Return the reply with all output so far."""
        spans = self._whole.versions
        version = spans[-1].version if spans else self._answered_at
        answer = self.body(
            self._text,
            self._prompt,
            prompt_tokens=len(self._prompt),
            cached=self._whole.cached_tokens,
            version=version.label if version is not None else None,
        )
        meta = answer["meta_info"]
        meta["num_retractions"] = self._whole.retractions
        meta["e2e_latency"] = time.perf_counter() - self._began
        if version is not None:
            meta["weight_version_seq"] = version.sequence
        return answer

    def end(self, sample: RolloutSample) -> dict[str, Any]:
        whole = self._whole = sample.whole
        self._answered_at = sample.answered_at
        self._prompt, self._text = sample.prompt_ids, whole.text
        self._spans = [
            {"version": span.version.label, "start": span.start, "end": span.end, "seq": span.version.sequence}
            for span in whole.versions
        ]
        self._input = [_entry(entry) for entry in sample.input_logprobs]
        self._input_top = [[_entry(top) for top in entry.top] or None for entry in sample.input_logprobs]
        self.finish = _finish(whole.finish_reason, len(self._ids), sample.error)
        answer = self.reply()
        if whole.HasField("engine_meta"):
            answer["meta_info"] = {**_data(whole.engine_meta), **answer["meta_info"]}
        return answer

    def all_of(self, sample: RolloutSample) -> dict[str, Any]:
        """Return the final reply of a sample without earlier calls of :meth:`take`."""
        self.take(sample.whole, sample.prompt_ids)
        return self.end(sample)


def _complete(prompt_request: PromptRequest, call: Call, model: str, body: Mapping[str, Any]) -> None:
    """Set the fields of the contract that SGLang's reader does not set."""
    request = prompt_request.request
    request.model = model
    request.adapter = _text(body, "lora_path")
    request.min_version_seq = min_version(call.headers)
    engine = {name: value for name, value in prompt_request.fields.items() if name in _ENGINE and value is not False}
    check_levels(engine, "")
    if prompt_request.sampling:
        check_levels(prompt_request.sampling, "sampling_params.", within=2)
        engine["sampling_params"] = prompt_request.sampling
    if engine:
        request.return_engine_meta = True
        try:
            request.engine_fields.update(engine)
        except (TypeError, ValueError) as error:
            raise Reason.FIELD_INVALID.error(f"{error}", field=", ".join(engine)) from None


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Reason.FIELD_INVALID.error(f"{name} must be a text", field=name)
    return value or ""


def _entry(entry: TokenLogprob) -> response.Entry:
    return [entry.logprob if entry.HasField("logprob") else None, entry.token_id, None]


def _data(value: object) -> Any:
    """Return the content of a Struct. NaN and infinity become null, as in SGLang; protobuf's reader refuses both."""
    if isinstance(value, Struct):
        return {name: _data(each) for name, each in value.items()}
    return [_data(each) for each in value] if isinstance(value, ListValue) else value


def _finish(reason: FinishReason, tokens: int, error: RlctlError | None) -> dict[str, Any]:
    if reason.type == FINISH_TYPE_LENGTH:
        return {"type": "length", "length": tokens}
    if reason.type == FINISH_TYPE_STOP:
        matched = reason.WhichOneof("matched")
        return {"type": "stop", "matched": getattr(reason, matched) if matched else None}
    if error is not None:
        return {**response.aborted(str(error)), "status_code": error.http_status, "err_type": error.reason.name}
    return response.aborted(reason.message)
