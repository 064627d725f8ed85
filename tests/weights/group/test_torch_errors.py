"""Errors of torch.distributed reach operators as causes, without source files and greetings of gloo's."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo

from rlctl.weights.group.torch_errors import cause_of


def two(timeout_s: float) -> list[ProcessGroupGloo]:
    """Both members of a gloo group, in this process."""
    store = HashStore()
    members: list[ProcessGroupGloo] = []

    def join(rank: int) -> None:
        members.append(ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=timeout_s)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return members


def receive(group: ProcessGroupGloo) -> str:
    """The raw text of a receive that fails."""
    with pytest.raises(RuntimeError) as caught:
        group.recv([torch.zeros(1)], 1 - group.rank(), 0).wait()
    return str(caught.value)


def test_a_silent_peer_is_named_in_plain_words() -> None:
    members = two(timeout_s=0.2)
    raw = receive(members[0])
    assert ".cc:" in raw
    assert cause_of(raw) == "no answer of a peer within 200 ms"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (
            "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6032. This is typically "
            "caused by a remote worker crashing. Check the logs of the remote worker. GLHF!",
            "the peer at 127.0.0.1:6032 closed its connection",
        ),
        (
            "[/x/gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:77: Connection reset by peer",
            "connection to 10.0.0.2:77: Connection reset by peer",
        ),
        ("[../a/b.h:12] something else\nwith a second line", "something else"),
        ("plain", "plain"),
    ],
)
def test_a_raw_text_becomes_one_plain_line(raw: str, cause: str) -> None:
    assert cause_of(dist.DistBackendError(raw)) == cause
    assert cause_of(raw) == cause


def test_an_error_without_a_text_is_named_by_its_type() -> None:
    assert cause_of(RuntimeError()) == "RuntimeError"
