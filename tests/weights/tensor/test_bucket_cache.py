"""Announcements are parsed once, and never taken for another one."""

from __future__ import annotations

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.verbs_pb2 import TensorBucket
from rlctl.weights.tensor.bucket_cache import Announced
from rlctl.weights.tensor.buckets import Bucket, to_proto
from rlctl.weights.tensor.tensors import TensorMeta


def messages(*names: str, group_name: str = "") -> list[TensorBucket]:
    found = []
    for sequence, name in enumerate(names):
        found.append(to_proto(Bucket(sequence, [TensorMeta(name, torch.float32, (2, 3))], True)))
        found[-1].group_name = group_name
    return found


def test_the_same_announcement_is_parsed_once() -> None:
    announced = Announced()
    first = announced.parse(messages("a", "b"), "group")
    assert [(group, bucket.metas[0].name) for group, bucket in first] == [("group", "a"), ("group", "b")]
    assert announced.parse(messages("a", "b"), "group") is first


@pytest.mark.parametrize(
    ("buckets", "group"),
    [
        (messages("a"), "group"),
        (messages("a", "c"), "group"),
        (messages("a", "b"), "another"),
        (messages("a", "b", group_name="own"), "group"),
        ([], "group"),
    ],
)
def test_anything_else_is_parsed_anew(buckets: list[TensorBucket], group: str) -> None:
    announced = Announced()
    first = announced.parse(messages("a", "b"), "group")
    other = announced.parse(buckets, group)
    assert other != first
    assert other == Announced().parse(buckets, group)


def test_one_that_is_refused_is_refused_again() -> None:
    announced = Announced()
    bad = messages("a", "")
    for _ in range(2):
        with pytest.raises(RlctlError) as caught:
            announced.parse(bad, "group")
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "buckets[1].names[0]")
