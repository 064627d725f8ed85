"""Messages of checkpoint-engine's parameter server are read as data."""

from __future__ import annotations

import base64
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from pickle_assembler import REDUCTIONS, UUID, Global, assemble, cuda_tensor, shared_tensor, size
from pickle_mutations import ATTACKS, Witness, mutated

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.checkpoint_engine import Ended, read_bucket, read_buffer
from rlctl.contract.serialized_tensors.handles import CudaStorage, Dtype, SharedStorage, Tensor

WHERE = "zmq_handles.GPU-0"

BUCKET = base64.b64decode(
    "gAWVpgAAAAAAAABdlCh9lCiMBG5hbWWUjBltb2RlbC5lbWJlZF90b2tlbnMud2VpZ2h0lIwFZHR5cGWUjAV0b3JjaJSMCGJmbG9hdDE2lJOUjAVz"
    "aGFwZZSMBXRvcmNolIwEU2l6ZZSTlEsQSwiGlIWUUpSMBm9mZnNldJRLAHV9lChoAowRbW9kZWwubm9ybS53ZWlnaHSUaARoB2gIaAtLCIWUhZRS"
    "lGgPTQABdWUu"
)
"""Two tensors of ``_to_named_tensor`` as pyzmq's ``send_pyobj`` wrote them, with torch 2.13."""

BUFFER = Tensor(Dtype("torch.uint8", 1), (1024,), 64, SharedStorage("torch_1_2_3", 2048))


def handle(call: Any, **changes: Any) -> bytes:
    """What ``reduce_tensor`` returns: a name and its arguments, without a call."""
    arguments = list(call.arguments)
    for index, value in changes.items():
        arguments[int(index.removeprefix("at_"))] = value
    return assemble((call.function, tuple(arguments)))


def refused(data: bytes, buffer: Tensor | None = BUFFER) -> str:
    with pytest.raises(RlctlError) as caught:
        read_buffer(data, UUID, WHERE) if buffer is None else read_bucket(data, buffer, WHERE)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert caught.value.field == WHERE
    assert caught.value.next_step
    return caught.value.message


@pytest.mark.parametrize("device", [0, 3, UUID])
def test_the_number_of_a_gpu_is_that_of_the_rank(device: object) -> None:
    buffer = read_buffer(handle(cuda_tensor(1024, modified=False, device=device)), UUID, WHERE)
    assert isinstance(buffer.storage, CudaStorage)
    assert (buffer.storage.device, buffer.shape) == (UUID, (1024,))


def test_a_buffer_in_shared_memory() -> None:
    buffer = read_buffer(handle(shared_tensor(1024, nbytes=1024, kind="uint8")), "cpu", WHERE)
    assert isinstance(buffer.storage, SharedStorage)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (assemble(None), "no handle"),
        (assemble([1]), "no handle"),
        (assemble((Global("torch", "Tensor"), ())), "no handle"),
        (assemble((Global(REDUCTIONS, "rebuild_cuda_tensor"), (1, 2))), "it has 2 arguments"),
        (assemble(cuda_tensor(8)), "no handle"),
        (handle(cuda_tensor(0, modified=False)), "is empty"),
        (handle(cuda_tensor(2, 8, modified=False)), "not one dimension of bytes"),
        (handle(shared_tensor(4, nbytes=16)), "not one dimension of bytes"),
        (assemble((Global("os", "system"), ("true",))), "'os.system'"),
    ],
)
def test_what_is_no_buffer_is_refused(data: bytes, cause: str) -> None:
    assert cause in refused(data, None)


def test_tensors_lie_where_the_message_says_in_the_buffer() -> None:
    placed = read_bucket(BUCKET, BUFFER, WHERE)
    assert placed is not None
    assert placed.storage is BUFFER.storage
    assert [(each.name, each.dtype, each.shape, each.offset) for each in placed.tensors] == [
        ("model.embed_tokens.weight", "torch.bfloat16", (16, 8), 64),
        ("model.norm.weight", "torch.bfloat16", (8,), 64 + 256),
    ]


def test_the_end_and_the_servers_error() -> None:
    assert read_bucket(pickle.dumps(None, -1), BUFFER, WHERE) is None
    with pytest.raises(Ended, match="Some workers failed"):
        read_bucket(pickle.dumps(RuntimeError("Some workers failed to update weights"), -1), BUFFER, WHERE)


def listed(**changes: Any) -> bytes:
    good = {"name": "w", "dtype": Global("torch", "float32"), "shape": size(4), "offset": 0}
    return assemble([{name: value for name, value in (good | changes).items() if value != "none"}])


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (assemble(7), "no list"),
        (assemble([7]), "other fields"),
        (listed(offset="none"), "other fields"),
        (listed(more=1), "other fields"),
        (listed(name=""), "name"),
        (listed(dtype="float32"), "dtype"),
        (listed(shape=4), "size"),
        (listed(shape=size(0)), "no elements"),
        (listed(offset=-1), "offset"),
        (listed(offset=1020), "reaches beyond the buffer"),
        (listed(offset=2), "no multiple"),
        (listed(shape=size(1 << 40, 1 << 40)), "too many"),
        (assemble((Global(REDUCTIONS, "rebuild_cuda_tensor"), ())), "rebuild_cuda_tensor"),
        *[(assemble(attack), "") for attack in ATTACKS],
    ],
)
def test_what_is_no_bucket_is_refused(data: bytes, cause: str) -> None:
    assert cause in refused(data)
    assert Witness.calls == 0


def test_mutated_messages_execute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(36)
    seeds = [BUCKET, listed(), pickle.dumps(RuntimeError("x"), -1)]
    buffers = [handle(cuda_tensor(64, modified=False, device=0)), handle(shared_tensor(64, nbytes=64, kind="uint8"))]
    reasons = set()
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "Unpickler", None)
        patch.setattr("builtins.__import__", None)
        for _ in range(3000):
            reasons.add(outcome(lambda: read_bucket(mutated(random_, random_.choice(seeds)), BUFFER, WHERE)))
            reasons.add(outcome(lambda: read_buffer(mutated(random_, random_.choice(buffers)), UUID, WHERE)))
    assert Witness.calls == 0
    assert Reason.FIELD_INVALID in reasons
    assert reasons <= {Reason.FIELD_INVALID, Reason.UNSUPPORTED, None}


def outcome(read: Callable[[], object]) -> Reason | None:
    try:
        read()
    except RlctlError as error:
        return error.reason
    except Ended:
        pass
    return None
