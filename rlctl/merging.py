"""A streamed answer put together: what is new added to what there was."""

from __future__ import annotations

from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import GenerateResponse, Sample, VersionSpan


def merge(whole: GenerateResponse, part: GenerateResponse) -> None:
    """Add what is new to what there was."""
    samples = {sample.index: sample for sample in whole.samples}
    new = list(part.samples)
    head = GenerateResponse()
    head.CopyFrom(part)
    del head.samples[:]
    whole.MergeFrom(head)
    for sample in new:
        mine = samples.get(sample.index)
        if mine is None:
            mine = samples[sample.index] = whole.samples.add(index=sample.index)
        merge_sample(mine, sample)


def merge_sample(whole: Sample, part: Sample) -> None:
    """The same of one sample."""
    whole.text += part.text
    whole.output_ids.extend(part.output_ids)
    whole.output_logprobs.extend(part.output_logprobs)
    if part.HasField("finish_reason"):
        whole.finish_reason.CopyFrom(part.finish_reason)
    whole.completion_tokens = part.completion_tokens
    whole.cached_tokens = part.cached_tokens
    whole.retractions = part.retractions
    if part.HasField("engine_meta"):
        whole.engine_meta.CopyFrom(part.engine_meta)
    for span in part.versions:
        last = whole.versions[-1] if whole.versions else None
        same = last is not None and _of(last) == _of(span)
        if last is not None and same and last.end == span.start:
            last.end = span.end
        else:
            whole.versions.add().CopyFrom(span)


def _of(span: VersionSpan) -> tuple[WeightVersion, WeightVersion, str]:
    """What a stretch of output was generated with."""
    return span.version, span.kv_version, span.adapter_version
