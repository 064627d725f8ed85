"""What can be told of NCCL groups without a GPU: how torch is asked for one, and that leaving one waits for nobody."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rlctl.weights.group.nccl import nccl_group
from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.group.rendezvous import Member

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Asked:
    """In torch's place: how it was asked."""

    Options = SimpleNamespace

    def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
        self.place = (store, rank, size)
        self.limit_s = options._timeout.total_seconds()
        self.handling = os.environ[HANDLING]


@pytest.mark.parametrize("own", [None, "1"])
def test_a_group_that_fails_ends_no_process_and_has_the_limit_of_its_broadcasts(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Asked, raising=False)
    if own is None:
        monkeypatch.delenv(HANDLING, raising=False)
    else:
        monkeypatch.setenv(HANDLING, own)
    group = nccl_group("store", 1, 3, 600.0)
    assert (group.place, group.limit_s, group.handling) == (("store", 1, 3), 600.0, "2")
    assert os.environ.get(HANDLING) == own, "the trainer's own groups are as the trainer wants them"


def test_leaving_a_group_does_not_wait_for_its_communicators_to_be_given_up() -> None:
    ended, aborted = threading.Event(), threading.Event()

    def abort() -> None:
        assert ended.wait(30)
        aborted.set()

    member = Member("group", 0, 2, "nccl", "127.0.0.1", 600.0, process_group=SimpleNamespace(abort=abort))
    group = WeightGroup(member)
    group.interrupt()
    group.close()
    assert not aborted.is_set()
    ended.set()
    assert aborted.wait(30)
