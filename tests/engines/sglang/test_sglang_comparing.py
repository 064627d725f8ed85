"""Which tensor differs, and what each rank holds of it."""

from __future__ import annotations

import pytest
import torch
from rlctl_sglang.readback.mismatch import Comparing
from rlctl_sglang.readback.parameter_layout import Parameter, Piece

from rlctl.contract.fingerprints import fingerprints
from rlctl.weights.tensor.digest import ModelDigest, tensor_digest
from rlctl.weights.tensor.tensors import TensorMeta

SHAPE = (4, 2)
NAMES = ("a", "b", "c")
REFERENCE = {name: TensorMeta(name, torch.float32, SHAPE) for name in NAMES}


def halves(name: str, full: torch.Tensor) -> list[tuple[Parameter, torch.Tensor]]:
    """As two ranks hold it."""
    return [
        (Parameter(name, full.dtype, (2, 2), 0, (Piece(name, start, start + 2),)), full.narrow(0, start, 2))
        for start in (0, 2)
    ]


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_the_first_in_the_order_of_names_is_told_whatever_comes_first(order: tuple[str, ...]) -> None:
    sent = {name: torch.full(SHAPE, float(index)) for index, name in enumerate(NAMES)}
    digest = ModelDigest()
    for name, tensor in sent.items():
        digest.add(name, tensor)
    found = {name: tensor.clone() for name, tensor in sent.items()}
    found["b"][3] = 9
    found["c"][0] = 9
    comparing = Comparing(REFERENCE, fingerprints(digest.digests))
    for name in order:
        comparing.take(name, found[name], halves(name, found[name]))
    reports = [comparing.difference(rank) for rank in range(2)]
    assert {(report.tensors, report.count, report.first) for report in reports} == {(3, 2, "b")}
    assert [(r.part.dim, r.part.start, r.part.length) for r in reports] == [(0, 0, 2), (0, 2, 2)]
    wanted = [tensor_digest("b", sent["b"][start : start + 2]) for start in (0, 2)]
    assert [report.part.sha256 == each for report, each in zip(reports, wanted, strict=True)] == [True, False]


def test_a_rank_that_holds_all_of_it_says_whether_its_own_differs() -> None:
    sent, lost = torch.zeros(SHAPE), torch.ones(SHAPE)
    meta = {"a": REFERENCE["a"]}
    comparing = Comparing(meta, fingerprints({"a": tensor_digest("a", sent)}))
    whole = Parameter("a", sent.dtype, SHAPE, 0, (Piece("a", 0, SHAPE[0]),))
    comparing.take("a", lost, [(whole, lost), (whole, sent)])
    assert [comparing.difference(rank).part.differs for rank in range(2)] == [True, False]


def test_nothing_differs() -> None:
    comparing = Comparing({"a": REFERENCE["a"]}, fingerprints({"a": tensor_digest("a", torch.zeros(SHAPE))}))
    comparing.take("a", torch.zeros(SHAPE), ())
    report = comparing.difference(0)
    assert (report.tensors, report.count, report.first, report.HasField("part")) == (1, 0, "", False)
