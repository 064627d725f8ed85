"""Merges the parts of a streamed response.

Texts and ``engine_meta`` stay out of the messages until the end. A message field that is set anew leaves its old value
in the message's memory: a text that grows by each of 32,000 tokens takes 2 GB.
"""

from __future__ import annotations

from google.protobuf.struct_pb2 import Struct

from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.rollout_pb2 import GenerateResponse, Sample, VersionSpan


class Merged:
    """A merged response."""

    def __init__(self) -> None:
        self._head = GenerateResponse()
        self._samples: dict[int, MergedSample] = {}

    def add(self, part: GenerateResponse) -> None:
        for field, value in part.ListFields():
            if field.name == "samples":
                continue
            if field.is_repeated:
                getattr(self._head, field.name).extend(value)
            elif field.message_type is not None:
                getattr(self._head, field.name).CopyFrom(value)
            elif getattr(self._head, field.name) != value:
                setattr(self._head, field.name, value)
        for sample in part.samples:
            if sample.index not in self._samples:
                self._samples[sample.index] = MergedSample(Sample(index=sample.index))
            self._samples[sample.index].add(sample)

    def message(self) -> GenerateResponse:
        """Return the merged response, with samples in the order of their first parts."""
        response = GenerateResponse()
        response.CopyFrom(self._head)
        for sample in self._samples.values():
            sample.fill(response.samples.add())
        return response


class MergedSample:
    """A merged sample.

    Attributes:
        rest: the sample without text and ``engine_meta``.
        text_length: in characters.
    """

    def __init__(self, whole: Sample) -> None:
        """Start with the present content of a sample."""
        self.rest = Sample()
        self.rest.CopyFrom(whole)
        self.rest.ClearField("text")
        self.rest.ClearField("engine_meta")
        self._texts = [whole.text]
        self.text_length = len(whole.text)
        self._engine_meta: Struct | None = whole.engine_meta if whole.HasField("engine_meta") else None

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0]

    @text.setter
    def text(self, text: str) -> None:
        self._texts, self.text_length = [text], len(text)

    def add(self, part: Sample) -> None:
        rest = self.rest
        text = part.text
        self._texts.append(text)
        self.text_length += len(text)
        rest.output_ids.extend(part.output_ids)
        rest.output_logprobs.extend(part.output_logprobs)
        if part.HasField("finish_reason"):
            rest.finish_reason.CopyFrom(part.finish_reason)
        rest.completion_tokens = part.completion_tokens
        rest.cached_tokens = part.cached_tokens
        rest.retractions = part.retractions
        if part.HasField("engine_meta"):
            self._engine_meta = part.engine_meta
        for span in part.versions:
            last = rest.versions[-1] if rest.versions else None
            if last is not None and last.end == span.start and _of(last) == _of(span):
                last.end = span.end
            else:
                rest.versions.add().CopyFrom(span)

    def fill(self, whole: Sample) -> None:
        """Fill an empty message."""
        whole.CopyFrom(self.rest)
        whole.text = self.text
        if self._engine_meta is not None:
            whole.engine_meta.CopyFrom(self._engine_meta)


def _of(span: VersionSpan) -> tuple[WeightVersion, WeightVersion, str]:
    """Return the versions that generated a span of output."""
    return span.version, span.kv_version, span.adapter_version
