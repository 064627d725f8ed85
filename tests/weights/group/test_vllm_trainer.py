"""What a trainer sends with under vLLM's names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from weights_helpers import Background

from rlctl.contract.errors import Internal, RlctlError
from rlctl.contract.vllm_groups import GROUP
from rlctl.integrations.vllm_weight_transfer import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    packed_nccl_broadcast_producer,
    trainer_init,
)
from rlctl.weights.group.process_group import WeightGroup, join
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

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
        self.told.append("init")
        self._happens()

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


class Other(Weights):
    """Weights that differ from their announcement, or fail; ``passed``: number of tensors that were gathered."""

    def __init__(self, second: str) -> None:
        self.second = second
        self.passed = 0

    def metadata(self) -> Sequence[TensorMeta]:
        return [TensorMeta(name, torch.float32, (4,)) for name in ("v", "w", "x")]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("v", self.second, "x"):
            self.passed += 1
            if name == "fails":
                raise OSError("a rank of the trainer is gone")
            yield name, torch.ones(4)


@pytest.mark.parametrize(("second", "error"), [("other", RlctlError), ("fails", OSError)])
def test_a_pass_that_differs_from_its_announcement_spends_the_group(
    form: Form, second: str, error: type[Exception]
) -> None:
    """The engines wait for bytes that do not come. The next update's bytes are not taken for them."""
    sender, receiver = form(2, broadcast_timeout_s=60.0)
    ended: list[Exception] = []

    def receive() -> None:
        for _ in range(3):
            try:
                receiver.broadcast(torch.zeros(16, dtype=torch.uint8))
            except RlctlError as failure:
                ended.append(failure)
                return

    source = Other(second)
    info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=1, world_size=2, packed=False, rank=0)
    engine = NCCLTrainerWeightTransferEngine(info, Client(receive), source)
    engine.model_update_group = sender
    started = time.monotonic()
    with pytest.raises(error):
        engine.send_weights()
    until = time.monotonic() + 10
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() - started < 10
    assert ended, "the engines still wait"
    assert not sender.stands
    assert source.passed == (3 if second == "other" else 2), "the other ranks of the trainer gather every tensor"


def test_engines_that_refuse_an_update_leave_no_rank_of_the_trainer_in_a_gather(form: Form) -> None:
    source = Other("w")
    info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=1, world_size=2, packed=False, rank=0)
    client = Client(lambda: None)
    client.start_weight_update = refuse  # type: ignore[method-assign]
    engine = NCCLTrainerWeightTransferEngine(info, client, source)
    engine.model_update_group, _ = form(2)
    with pytest.raises(ConnectionError):
        engine.send_weights()
    assert source.passed == 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_why_the_engines_join_no_group_is_told_at_once() -> None:
    info, client = NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, rank=0), Client(refuse)
    with pytest.raises(ConnectionRefusedError, match="do not want them"):
        Background(lambda: NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=Weights())).result(
            5
        )
    assert client.told == ["init"]


@pytest.mark.parametrize(
    ("before", "first"),
    [("stands", "trainer"), *((how, who) for how in ("closed", "broken", "gone") for who in ("trainer", "engine"))],
)
def test_a_group_is_formed_anew_at_the_same_port(before: str, first: str) -> None:
    where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}

    def late(who: str) -> None:
        if who != first:
            time.sleep(0.3)

    def engine() -> WeightGroup:
        late("engine")
        return join(("127.0.0.1", where["master_port"]), name=GROUP, rank=1, world_size=2, timeout_s=5)  # type: ignore[arg-type]

    def trainer() -> WeightGroup:
        late("trainer")
        return trainer_init(where)

    def formed() -> tuple[WeightGroup, WeightGroup]:
        joined = Background(engine)
        return Background(trainer).result(8), joined.result(8)

    sender: WeightGroup | None
    sender, receiver = formed()
    if before == "closed":
        sender.close()
    elif before == "broken":
        sender.interrupt()
    elif before == "gone":
        sender = None
    receiver.close()
    again, receiver = formed()
    received = torch.zeros(4)
    taken = Background(lambda: receiver.broadcast(received))
    again.broadcast(torch.ones(4))
    taken.result(5)
    assert received.tolist() == [1.0] * 4
    again.close()
    receiver.close()
