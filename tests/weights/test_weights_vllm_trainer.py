"""What a trainer sends with under vLLM's names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from weights_helpers import Background

from rlctl.compat.vllm import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine, packed_nccl_broadcast_producer
from rlctl.errors import Internal
from rlctl.weights.groups import WeightGroup
from rlctl.weights.tensors import TensorMeta, as_bytes

Form = Callable[..., list[WeightGroup]]


def test_single_elements_are_packed_whatever_their_stride(form: Form) -> None:
    sender, receiver = form(2)
    one, two = torch.arange(8.0).reshape(4, 2)[1:2, 1], torch.tensor([5], dtype=torch.bfloat16)
    received = torch.zeros(6, dtype=torch.uint8)
    taken = Background(lambda: receiver.broadcast(received))
    packed_nccl_broadcast_producer([("one", one), ("two", two)], sender)
    taken.result(10)
    assert received.tolist() == [*as_bytes(one).tolist(), *as_bytes(two).tolist()]


class Weights:
    """One tensor."""

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta("w", torch.float32, (4,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(4)


class Client:
    """Engines that do something when an update is announced."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.told: list[str] = []
        self._happens = happens

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        raise AssertionError

    def start_weight_update(self) -> None:
        self.told.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.told.append("update")
        self._happens()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.told.append("finish")


def trainer(group: WeightGroup, client: Client) -> NCCLTrainerWeightTransferEngine:
    info = NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=0)
    engine = NCCLTrainerWeightTransferEngine(info, client, Weights())
    engine.model_update_group = group
    return engine


def refuse() -> None:
    raise ConnectionRefusedError("the engines do not want them")


def test_why_the_engines_take_nothing_in_is_told_at_once(form: Form) -> None:
    sender, _ = form(2)
    client = Client(refuse)
    with pytest.raises(ConnectionRefusedError, match="do not want them"):
        Background(trainer(sender, client).send_weights).result(5)
    assert client.told == ["start", "update"]


def test_engines_that_fail_once_they_have_the_weights_cost_no_group(form: Form) -> None:
    sender, receiver = form(2)
    sent = threading.Event()
    received = torch.zeros(16, dtype=torch.uint8)

    def take_and_refuse() -> None:
        receiver.broadcast(received)
        assert sent.wait(10)
        time.sleep(0.1)  # its caller goes on
        refuse()

    client = Client(take_and_refuse)
    broadcast = sender.broadcast

    def noted(tensor: torch.Tensor, src: int = 0) -> None:
        broadcast(tensor, src)
        sent.set()

    sender.broadcast = noted  # type: ignore[method-assign]
    with pytest.raises(ConnectionRefusedError):
        trainer(sender, client).send_weights()
    again = Client(lambda: receiver.broadcast(received))
    trainer(sender, again).send_weights()
    assert again.told == ["start", "update", "finish"]


def test_a_group_that_breaks_by_itself_is_told(form: Form) -> None:
    sender, receiver = form(2)
    leave = threading.Event()

    def wait() -> None:
        receiver.interrupt()
        leave.wait(10)

    with pytest.raises(Internal, match="broadcast"):
        trainer(sender, Client(wait)).send_weights()
    leave.set()
