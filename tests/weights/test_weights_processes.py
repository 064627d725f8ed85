"""Groups with members in processes of their own: killed, stopped, of SGLang's making."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from member import VALUES
from weights_helpers import Background

from rlctl.errors import Internal
from rlctl.v1 import common_pb2
from rlctl.weights.groups import GroupStore, WeightGroup, join

pytestmark = pytest.mark.processes

Start = Callable[[str, int], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(role: str, port: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("member.py")), role, str(port), "group"],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def joined(store: GroupStore) -> WeightGroup:
    return join(store, name="group", rank=0, world_size=2, timeout_s=30, broadcast_timeout_s=600)


def test_sglangs_own_ranks_receive_from_us(store: GroupStore, start: Start) -> None:
    process = start("sglang-receiver", store.port)
    group = joined(store)
    group.broadcast(torch.tensor(VALUES))
    assert process.communicate(timeout=30)[0].strip() == str(VALUES)
    assert process.returncode == 0
    group.close()


def test_we_receive_from_a_source_that_sglang_code_made(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    process = start("sglang-source", address[1])
    group = join(address, name="group", rank=1, world_size=2, timeout_s=30)
    tensor = torch.zeros(len(VALUES))
    group.broadcast(tensor)
    assert tensor.tolist() == VALUES
    assert process.wait(30) == 0
    group.close()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_stops_between_two_tensors(store: GroupStore, start: Start, fate: signal.Signals) -> None:
    process = start("sender-of-half", store.port)
    group = joined(store)
    first = torch.zeros(len(VALUES))
    group.broadcast(first, src=1)
    assert first.tolist() == VALUES
    job = Background(lambda: group.broadcast(torch.zeros(4), src=1))
    while not group.under_way:
        time.sleep(0.001)
    process.send_signal(fate)
    if fate is signal.SIGSTOP:
        # Nothing tells a stopped sender from a slow one; the coordinator's deadline interrupts.
        group.interrupt()
    with pytest.raises(Internal) as caught:
        job.result(10)
    assert caught.value.outcome == common_pb2.OUTCOME_DIRTY
    assert not group.under_way
    group.close()


def test_a_process_ends_while_it_receives(store: GroupStore, start: Start) -> None:
    process = start("exits-while-receiving", store.port)
    group = joined(store)
    group.broadcast(torch.zeros(len(VALUES)), src=1)
    # Its second broadcast would wait for ten minutes.
    assert process.wait(20) == 0
    group.close()
