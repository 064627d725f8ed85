"""However a sender or a receiver ends, no shared memory is left: counted in files and in bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from segment_helpers import (
    CPU,
    Member,
    big_model,
    fork_and_let_go,
    receive,
    receive_half,
    send,
    send_and_fork,
    send_half,
    soon,
)
from shared_memory import held
from weights_helpers import digest_of

from rlctl.weights.shared_memory.posix import sweep
from rlctl.weights.shared_memory.reader import SegmentReader
from rlctl.weights.shared_memory.sender import SegmentSender

pytestmark = pytest.mark.processes

Start = Callable[..., Member]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes; afterwards nothing of what they had is left."""
    started: list[Member] = []
    names: set[str] = set()

    def run(role: Callable[..., None], *arguments: object) -> Member:
        started.append(Member(role, *arguments))
        return started[-1]

    yield run
    for member in started:
        if member.process.is_alive():
            names |= member.segments()
        member.kill()
    sweep()
    assert held(names) == set()


def test_a_sender_that_is_killed(start: Start) -> None:
    """Its receivers remove what it leaves, within moments, without being asked."""
    sender, receiver = start(send, 0), start(receive)
    receiver.tell(sender.messages())
    assert receiver.hear() == digest_of(big_model())
    names = sender.segments()
    assert len(names) == 1
    assert receiver.segments() == names == held(names)
    sender.kill()
    assert soon(lambda: not held(names))
    # The receiver goes on: the next sender's segments are new ones.
    receiver.tell(start(send, 1).messages())
    assert receiver.hear() == digest_of(big_model(1))


def test_a_receiver_that_is_killed(start: Start) -> None:
    """The sender's segment is the sender's: it stays, serves the next receiver, and goes with the sender."""
    sender, receiver = start(send, 0), start(receive)
    messages = sender.messages()
    receiver.tell(messages)
    receiver.hear()
    receiver.kill()
    names = sender.segments()
    assert held(names) == names
    second = start(receive)
    second.tell(messages)
    assert second.hear() == digest_of(big_model())
    sender.tell([])
    assert soon(lambda: not held(names))
    assert second.process.is_alive()


@pytest.mark.parametrize("successor", [SegmentSender, lambda: SegmentReader(CPU)], ids=["sender", "reader"])
def test_both_killed(start: Start, successor: Callable[[], SegmentSender | SegmentReader]) -> None:
    """Whoever starts next removes it."""
    sender, receiver = start(send, 0), start(receive)
    receiver.tell(sender.messages())
    receiver.hear()
    names = receiver.segments()
    sender.kill()
    receiver.kill()
    successor().close()
    assert held(names) == set()


def test_a_sender_that_is_killed_while_it_writes(start: Start) -> None:
    sender = start(send_half)
    sender.hear()
    names = sender.segments()
    assert len(names) == 1
    sender.kill()
    SegmentSender().close()
    assert held(names) == set()


def test_a_receiver_that_is_killed_while_it_reads(start: Start) -> None:
    sender, receiver = start(send, 0), start(receive_half)
    receiver.tell(sender.messages())
    receiver.hear()
    names = receiver.segments()
    assert len(names) == 1
    receiver.kill()
    assert held(names) == names
    sender.kill()
    SegmentReader(CPU).close()
    assert held(names) == set()


def test_a_stopped_sender_is_no_dead_one(start: Start) -> None:
    sender, receiver = start(send, 0), start(receive)
    messages = sender.messages()
    assert sender.process.pid is not None
    os.kill(sender.process.pid, signal.SIGSTOP)
    SegmentReader(CPU).close()
    receiver.tell(messages)
    assert receiver.hear() == digest_of(big_model())


def test_a_child_of_the_sender_that_lets_go_frees_nothing_of_its_own(start: Start) -> None:
    assert start(fork_and_let_go).hear() == 0


def test_a_child_of_the_sender_keeps_nothing_alive(start: Start) -> None:
    """A data loader's worker, say, that was forked after the segments were made and lives on."""
    sender = start(send_and_fork)
    child = sender.hear()
    names = sender.segments()
    assert len(names) == 1
    try:
        sender.kill()
        SegmentSender().close()
        assert held(names) == set()
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
